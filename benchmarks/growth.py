"""What a step's bookkeeping costs as things grow: parameter tensors, ranks, the data set, a checkpoint.

python benchmarks/growth.py [--scale 1.0] [--worlds 1,2,4,8] [--plot growth.png]

Bookkeeping is what a step of Lockstep takes beyond the same step written by hand, by processor time. The agreement of
the ranks is timed with its message sent beside the last gradients and, in every other step, after them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Loss, Recipe, distributed, launch
from lockstep.checkpoint import Checkpoints
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.rng import Rng
from lockstep.rundir import resolve_run_dir
from lockstep.stream import Stream
from lockstep.trainer import Trainer


class Many(nn.Module):
    """A model of many small tensors."""

    def __init__(self, tensors: int):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(list(self.parts)).sum()


class ManyTensors(Recipe):
    name = "many-tensors"
    defaults = {"batch_size": 8, "n_steps": 100_000, "num_workers": 0, "tensorboard": False, "log_every": 50}
    tensors = 100

    def model(self) -> nn.Module:
        return Many(self.tensors)

    def dataset(self, split: str) -> Any:
        return [{"x": torch.tensor(float(i))} for i in range(64)] if split == "train" else None

    def loss(self, model: nn.Module, batch: Any, rng: Rng) -> Loss:
        error = (model(batch["x"]) - 1).square()
        return Loss(error.sum(), error.numel())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; smaller is quicker")
    parser.add_argument("--worlds", default="1,2,4,8", help="numbers of ranks")
    parser.add_argument("--plot", type=Path, help="PNG file for the curves")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.rank is not None:
        return be_rank(options.rank)
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = [max(2, int(options.scale * 10**k)) for k in (2, 3, 4)]
    found = {
        "bookkeeping of a step, ms, by parameter tensors": {n: bookkeeping(n) for n in sizes},
        "indices of a global batch of 256, ms, by samples": {10**k: indices(10**k) for k in range(3, 10)},
        "pause of the loop for a checkpoint, ms, by MB": {},
        "checkpoint on disk, ms, by MB": {},
        "agreement beside the gradients, ms, by ranks": {},
        "agreement after the gradients, ms, by ranks": {},
    }
    for megabytes in sorted({max(1, int(options.scale * size)) for size in (1, 10, 100)}):
        pause, written = checkpoint(megabytes)
        found["pause of the loop for a checkpoint, ms, by MB"][megabytes] = pause
        found["checkpoint on disk, ms, by MB"][megabytes] = written
    for world in map(int, options.worlds.split(",")):
        beside, after = agreement(world)
        found["agreement beside the gradients, ms, by ranks"][world] = beside
        found["agreement after the gradients, ms, by ranks"][world] = after
    for title, values in found.items():
        print(f"{title}: {', '.join(f'{size:g}: {value:.3f}' for size, value in values.items())}")
    print(json.dumps(found))
    if options.plot is not None:
        draw(found, options.plot)
    return 0


def trainer(world: World, out: str, tensors: int = 100) -> Trainer:
    ManyTensors.tensors = tensors
    request = parse(ManyTensors, ["--device", "cpu", "--out", out], "growth")
    run = Trainer(request, world, resolve_run_dir(request.train.run, "many-tensors", world))
    run.model.train()
    return run


def bookkeeping(tensors: int) -> float:
    """Return the milliseconds of a step beyond those of the same step by hand."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(World(), folder, tensors)
        model = Many(tensors)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.arange(8.0)

        def by_hand() -> None:
            (model(x) - 1).square().mean().backward()
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()

        times = [(seconds(run.train_step), seconds(by_hand)) for _ in range(13)][3:]
        return 1000 * statistics.median(ours - theirs for ours, theirs in times)


def indices(samples: int) -> float:
    stream = Stream(samples, 256, 0)
    return 1000 * statistics.median(seconds(lambda k=k: stream.batch(k, 0, 1)) for k in range(20))  # type: ignore[misc]


def checkpoint(megabytes: int) -> tuple[float, float]:
    """Return the milliseconds that the loop waits, and until the checkpoint is on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints, tensors = Checkpoints(Path(folder), 1), {"model": {"w": torch.rand(megabytes * 250_000)}}
        started = time.perf_counter()
        pause = checkpoints.save(1, tensors, {})
        checkpoints.wait()
        return 1000 * pause, 1000 * (time.perf_counter() - started)


def agreement(world: int) -> tuple[float, float]:
    """Return the milliseconds that a step waits for the agreement, beside the gradients and after them."""
    with tempfile.TemporaryDirectory() as folder:
        if launch.start(world, [__file__, "--rank", folder]):
            return float("nan"), float("nan")
        beside, after = json.loads(Path(folder, "found.json").read_text())
        return beside, after


def be_rank(folder: Path) -> int:
    with distributed.session("cpu") as world:
        run = trainer(world, str(folder / "run"))
        agree, ask = run.step._agree, run.step.replica.buckets.on_last
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(44):
            run.step.replica.buckets.on_last = ask if step % 2 == 0 else lambda: None
            waited = list[float]()

            def timed(request: int, waited: list[float] = waited) -> int:
                started = time.perf_counter()
                agreed = agree(request)
                waited.append(time.perf_counter() - started)
                return agreed

            run.step._agree = timed  # type: ignore[method-assign]
            run.train_step()
            times[step % 2].extend(waited)
        ranks = world.gather([1000 * statistics.median(some[2:] or [0.0]) for some in times])
        if world.is_main:
            (folder / "found.json").write_text(json.dumps([statistics.median(r[i] for r in ranks) for i in (0, 1)]))
        run.step.close()
    return 0


def seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    for title, values in found.items():
        what, _, by = title.partition(", ms, by ")
        axis = axes[["parameter tensors", "samples", "MB", "ranks"].index(by)]
        axis.plot(list(values), list(values.values()), marker="o", label=what)
        logarithmic = by in ("MB", "ranks")
        axis.set(xscale="linear" if by == "ranks" else "log", yscale="log" if logarithmic else "linear")
        axis.set(xlabel=by, ylabel="ms")
        axis.legend(fontsize=7)
    for axis in axes[:2]:
        axis.set_ylim(0, None)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
