"""A training step of `dit` against the same step written by hand: ratios, and on a GPU images per second.

python benchmarks/step.py [--model DiT-S/2] [--batch_size 128] [--steps 30]
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.distributed import World, pick_device
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rng import Rng
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer


def ours(flags: list[str], folder: str) -> Trainer:
    request = parse(find("dit"), [*flags, "--out", folder, "--no_tensorboard"], "step")
    world = World(device=pick_device(request.train.hardware.device, 0))
    run = Trainer(request, world, resolve_run_dir(request.train.run, "dit", world))
    run.model.train()
    return run


def by_hand(run: Trainer) -> Callable[[], None]:
    """The step a careful user writes for one device: autocast, compile, fused AdamW, EMA; no loader at all."""
    device = run.world.device
    model = run.recipe.model().to(device).train()
    shadow = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    size = run.setup.batching.micro_batch
    x = torch.randn(size, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (size,), device=device)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        t = torch.randn(len(x), device=device).sigmoid()
        z = torch.randn_like(x)
        w = t.view(-1, 1, 1, 1)
        y = torch.where(torch.rand(len(x), device=device) < 0.1, 10, y)
        return (model((1 - w) * x + w * z, t, y).float() - (z - x)).square().mean()

    objective = torch.compile(loss) if run.setup.compiled else loss

    def step() -> None:
        with run.precision.autocast:
            value = objective(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(shadow, list(model.parameters()), 1e-4)

    return step


def seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(5):
        step()
    times = []
    for _ in range(5):
        start = finish()
        for _ in range(steps):
            step()
        times.append((finish() - start) / steps)
    return statistics.median(times)


def draws(run: Trainer, steps: int) -> float:
    """Seconds for all keyed draws of a step by themselves."""
    index = torch.arange(run.setup.batching.micro_batch, device=run.world.device)

    def act(epoch: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rng = Rng.of(0, epoch, index)
        return (
            rng.normal("noise", 3, 32, 32),
            rng.normal("time"),
            rng.bernoulli("drop", 0.1),
            rng.bernoulli("flip", 0.5),
        )

    act = torch.compile(act) if run.setup.compiled else act
    return seconds(lambda: act(index * 0, index), steps, run.world.device)


def main() -> None:
    flags = sys.argv[1:]
    steps = int(flags.pop(flags.index("--steps") + 1)) if "--steps" in flags else 30
    flags = [flag for flag in flags if flag != "--steps"]
    with tempfile.TemporaryDirectory() as folder:
        run = ours(["--compile", "auto", *flags], str(Path(folder) / "run"))
        step = by_hand(run)
        rows = {"lockstep": seconds(run.train_step, steps, run.world.device)}
        rows["by hand"] = seconds(step, steps, run.world.device)
        rows["lockstep again"] = seconds(run.train_step, steps, run.world.device)
        ratio = min(rows["lockstep"], rows["lockstep again"]) / rows["by hand"]
        result = {"device": str(run.world.device), "seconds": rows, "ratio": ratio}
        result["share_of_keyed_draws"] = draws(run, steps) / rows["by hand"]
        result["images_per_second"] = run.setup.batching.global_batch / rows["lockstep"]
        print(json.dumps(result, indent=2))
        del run


if __name__ == "__main__":
    main()
