"""Who trains it. Each contender makes the same step of the same model, as users of that library write it.

In all of them: the recipe's model, data, loss, optimizer and averages of the weights, in the precision of the flags,
on one device. A contender runs until `clock.tick()`, after each step, says that it is done.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import World
from ..flags import Request
from .clock import Clock
from .workloads import Averages, Work, endless

Train = Callable[[Request, Clock], None]


@dataclass(frozen=True)
class Contender:
    """A way to train. `packages`: one of them has to be installed."""

    train: Train
    packages: tuple[str, ...] = ()
    compiles: bool = False
    """It is only there to be compiled."""
    on_gpu_only: bool = False

    def installed(self) -> bool:
        return not self.packages or self.package() is not None

    def package(self) -> str | None:
        return next((name for name in self.packages if _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _loop(request: Request, clock: Clock, tuned: bool, mode: str | None = None) -> None:
    """Train as a script without a library does: step by step, or with all that is known to be fast."""
    work = Work(request)
    optimizer, averages = work.optimizer(fused=tuned), Averages(work, foreach=tuned)
    clip, scaler = work.config.optim.clip_grad, _scaler(work)
    objective: Any = torch.compile(work.objective, mode=mode) if tuned and work.compiles else work.objective
    if tuned and work.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    for keyed in endless(work.loader()):
        batch, index = work.to_device(keyed)
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        with work.precision.autocast:
            loss = work.loss(objective, batch, index)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(work.parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        averages.update()
        if not tuned:
            loss.item()  # most scripts print it
        if clock.tick():
            return


def _scaler(work: Work) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(work.device.type, enabled=work.precision.name == "fp16")


def plain_loop(request: Request, clock: Clock) -> None:
    _loop(request, clock, tuned=False)


def by_hand(request: Request, clock: Clock) -> None:
    _loop(request, clock, tuned=True)


def by_hand_with_graphs(request: Request, clock: Clock) -> None:
    _loop(request, clock, tuned=True, mode="reduce-overhead")


def _accelerate(request: Request, clock: Clock, compiled: bool) -> None:
    accelerate = importlib.import_module("accelerate")
    work = Work(request)
    averages = Averages(work, foreach=True)
    accelerator = accelerate.Accelerator(
        mixed_precision=_half(work) or "no",
        cpu=work.device.type == "cpu",
        dynamo_backend="inductor" if compiled else None,
    )
    objective, optimizer, loader = accelerator.prepare(work.objective, work.optimizer(fused=False), work.loader())
    for batch, index in endless(loader):
        loss = work.loss(objective, batch, index)
        accelerator.backward(loss)
        if work.config.optim.clip_grad:
            accelerator.clip_grad_norm_(work.parameters, work.config.optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
        if clock.tick():
            return


def accelerate(request: Request, clock: Clock) -> None:
    _accelerate(request, clock, compiled=False)


def accelerate_compiled(request: Request, clock: Clock) -> None:
    _accelerate(request, clock, compiled=True)


def _half(work: Work) -> str | None:
    return work.precision.name if work.precision.name in ("bf16", "fp16") else None


def _trainer_settings(work: Work) -> dict[str, Any]:
    """Return what Lightning's Trainer and Fabric are told alike."""
    half = _half(work)
    precision = f"{half}-mixed" if half else {"fp64": "64-true"}.get(work.precision.name, "32-true")
    return {"accelerator": "gpu" if work.device.type == "cuda" else "cpu", "devices": 1, "precision": precision}


def lightning(request: Request, clock: Clock) -> None:
    library: Any = importlib.import_module(CONTENDERS["Lightning"].package() or "")
    work = Work(request)
    averages = Averages(work, foreach=True)

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.objective = work.objective

        def training_step(self, keyed: tuple[Any, Tensor], _: int) -> Tensor:
            return work.loss(self.objective, *keyed)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(fused=False)

        def on_train_batch_end(self, *_: Any) -> None:
            averages.update()
            clock.tick()

    trainer = library.Trainer(
        **_trainer_settings(work),
        max_steps=clock.total,
        max_epochs=-1,
        gradient_clip_val=work.config.optim.clip_grad or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), work.loader())


def fabric(request: Request, clock: Clock) -> None:
    library: Any = importlib.import_module(CONTENDERS["Fabric"].package() or "")
    work = Work(request)
    averages = Averages(work, foreach=True)
    engine = library.Fabric(**_trainer_settings(work))
    optimizer = work.optimizer(fused=False)
    objective, optimizer = engine.setup(work.objective, optimizer)
    for batch, index in endless(engine.setup_dataloaders(work.loader())):
        engine.backward(work.loss(objective, batch, index))
        if work.config.optim.clip_grad:
            engine.clip_gradients(objective, optimizer, max_norm=work.config.optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
        if clock.tick():
            return


def lockstep(request: Request, clock: Clock) -> None:
    from ..rundir import resolve_run_dir
    from ..trainer import Trainer

    world = World(device=clock.device)
    run = Trainer(request, world, resolve_run_dir(request.train.run, request.recipe.name, world))
    run.model.train()
    while True:
        run.train_step()
        run.progress.step += 1
        if clock.tick():
            return


def lockstep_exact(request: Request, clock: Clock) -> None:
    request.train.hardware.exact = True
    lockstep(request, clock)


_FABRIC, _LIGHTNING = ("lightning.fabric", "lightning_fabric"), ("lightning.pytorch", "pytorch_lightning")
CONTENDERS = {
    "plain loop": Contender(plain_loop),
    "Accelerate": Contender(accelerate, ("accelerate",)),
    "Accelerate, compiled": Contender(accelerate_compiled, ("accelerate",), compiles=True),
    "Lightning": Contender(lightning, _LIGHTNING),
    "Fabric": Contender(fabric, _FABRIC),
    "by hand": Contender(by_hand),
    "by hand, CUDA graphs": Contender(by_hand_with_graphs, compiles=True, on_gpu_only=True),
    "Lockstep": Contender(lockstep),
    "Lockstep --exact": Contender(lockstep_exact),
}
