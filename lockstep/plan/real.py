"""A few real steps of a run on this machine, with the engine's own loop: their time, data and memory."""

import gc
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..config import TrainConfig
from ..distributed import World, pick_device
from ..flags import Request
from ..rundir import resolve_run_dir
from ..trainer import Trainer

WARM_UP = {"cuda": 10, "cpu": 2}
"""Steps that are not counted: they compile, and fill caches and queues."""


@dataclass(frozen=True)
class RealStep:
    """The mean of some steps on one device."""

    device: str
    seconds: float
    data_seconds: float
    """Of these, waiting for the loader."""
    memory: float | None
    """The most bytes that were allocated on the GPU."""
    samples: int
    micro_batch: int
    accumulation: int
    gradient_bytes: float

    @property
    def computation(self) -> float:
        return max(1e-9, self.seconds - self.data_seconds)


def measure_steps(request: Request, limit: float = 10.0, steps: int = 20) -> RealStep:
    """Return the mean over up to `steps` steps of one rank, in about `limit` seconds after warm-up."""
    hardware = request.train.hardware
    world = World(device=pick_device(hardware.device, 0))
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        run = replace(request.train.run, out=str(Path(folder) / "run"), resume=None, tensorboard=False, use_wandb=False)
        train = TrainConfig(request.train.data, request.train.optim, hardware, run)
        trainer = Trainer(replace(request, train=train), world, resolve_run_dir(run, request.recipe.name, world))
        trainer.model.train()
        began = _now(world)
        for _ in range(WARM_UP[world.device.type]):
            _advance(trainer)
            if world.device.type == "cpu" and _now(world) - began > limit / 2:
                break  # nothing is compiled there
        started, waited, count = _now(world), world.activity.data_seconds, 0
        while count < steps and (count < 1 or _now(world) - started < limit):
            _advance(trainer)
            count += 1
        seconds, data = _now(world) - started, world.activity.data_seconds - waited
        memory = float(torch.cuda.max_memory_allocated(world.device)) if world.device.type == "cuda" else None
        batching, name = trainer.setup.batching, "CPU"
        if world.device.type == "cuda":
            name = torch.cuda.get_device_name(world.device)
        gradient_bytes = float(sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad))
        trainer.step.close()
        del trainer
        gc.collect()
    return RealStep(
        name, seconds / count, data / count, memory, batching.global_batch, batching.micro_batch,
        batching.accumulation, gradient_bytes,
    )  # fmt: skip


def _advance(trainer: Trainer) -> None:
    trainer.train_step()
    trainer.progress.step += 1


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()
