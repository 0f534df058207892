"""How accurate exact sums are: gradients on the grid, and plain float32 sums, against float64 sums of the same tiles.

python benchmarks/exact_accuracy.py [--recipes dit,jit,scribble,protein,vision] [--steps 10] [--tiles 8]
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lockstep.distributed import World, pick_device
from lockstep.exact import ExactSums, Numbered
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer


class Compared(ExactSums):
    """Exact sums that keep the sums of the same gradients in float64 and in float32."""

    def start_step(self) -> None:
        super().start_step()
        self.float64: dict[int, Tensor] = {}
        self.float32: dict[int, Tensor] = {}

    def add(self, gradients: Numbered, last: bool) -> None:
        for i, gradient in gradients:
            self.float64[i] = self.float64.get(i, 0) + gradient.double()
            self.float32[i] = self.float32.get(i, 0) + gradient
        super().add(gradients, last)

    def errors(self) -> tuple[dict[int, float], dict[int, float]]:
        """Of each tensor, the relative error of the grid's sum and of the float32 sum."""
        grid, plain = {}, {}
        for i, exact in self.float64.items():
            norm, summed = exact.norm(), self.parameters[i].grad
            if norm > 0 and summed is not None:
                grid[i] = ((summed.double() - exact).norm() / norm).item()
                plain[i] = ((self.float32[i].double() - exact).norm() / norm).item()
        return grid, plain


def measure(recipe: str, steps: int, tiles: int, flags: list[str], folder: Path) -> dict[str, float]:
    """The median and the largest relative error over all tensors and steps, of both kinds of sums."""
    found = find(recipe)
    laptop = ["--preset", "laptop"] if "laptop" in found.presets else []
    batch = ["--batch_size", "2", "--global_batch_size", str(2 * tiles), "--exact", "--no_tensorboard"]
    request = parse(found, [*laptop, *batch, *flags, "--out", str(folder)], "exact_accuracy")
    world = World(device=pick_device(request.train.hardware.device, 0))
    run = Trainer(request, world, resolve_run_dir(request.train.run, recipe, world))
    assert run.state.sums is not None
    run.state.sums.__class__ = Compared
    run.model.train()
    errors: tuple[list[float], list[float]] = [], []
    finish = run.state.sums.finish_step

    def finish_and_compare() -> None:
        finish()
        if not run.state.sums.overflowed():  # type: ignore[union-attr]  # else the step is done again
            for kept, new in zip(errors, run.state.sums.errors(), strict=True):  # type: ignore[union-attr]
                kept.extend(new.values())

    run.state.sums.finish_step = finish_and_compare  # type: ignore[method-assign]
    for _ in range(steps):
        run.train_step()
        run.progress.step += 1
    run.step.confirm()
    names = ("grid", "float32")
    medians = {f"{name}, median": statistics.median(e) for name, e in zip(names, errors, strict=True)}
    return medians | {f"{name}, largest": max(e) for name, e in zip(names, errors, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", default="dit,jit,scribble,protein,vision")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiles", type=int, default=8)
    asked, flags = parser.parse_known_args()
    torch.set_num_threads(1)
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would leave one tile
    with tempfile.TemporaryDirectory() as parent:
        for recipe in asked.recipes.split(","):
            found = measure(recipe, asked.steps, asked.tiles, flags, Path(parent) / recipe)
            print(
                f"{recipe}: relative error of summed gradients: {json.dumps({k: f'{v:.1e}' for k, v in found.items()})}"
            )


if __name__ == "__main__":
    main()
