"""Every step in detail, for runs that are compared: weights, optimizer state, generators, loss, checkpoints.

It costs a checksum of everything in every step, so it is installed for short runs only.
"""

import threading
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...watch.drift import checksums
from ..events import CheckpointSaved, LossValue, StepStart
from ..patch import Function
from .context import Context, WatchedOptimizer, never_raises
from .data import generator_states
from .tensors import tensors

ENOUGH = "enough"
"""The file that ends a run whose checkpoint is to be resumed."""
_SAVES = (
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("safetensors.torch", "save_file"),
)


def install(context: Context, stop_at_save: int | None) -> None:
    """Record each step. With `stop_at_save` the run ends before the first save after the one at that step or later."""
    probe = Steps(context, stop_at_save)
    context.patches.later(register_optimizer_step_pre_hook(probe.before_step).remove)
    context.watch(torch.autograd, "backward", probe.before_backward)
    context.intercept(torch, "save", probe.save)
    for module, name in _SAVES:
        context.intercept(module, name, probe.save)


class Steps:
    """State of the probes of one rank's steps."""

    def __init__(self, context: Context, stop_at_save: int | None):
        self.context, self.recorder, self.stop_at_save = context, context.recorder, stop_at_save
        self.saved_at: int | None = None  # the step of the last checkpoint

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = next((w for w in self.context.optimizers if w.optimizer is optimizer), None)
        if watched is None or self.context.hidden:
            return
        if not watched.backwards and not any(watched.rates):  # only creates the state that a checkpoint is loaded into
            return
        self._record(watched)

    @never_raises
    def _record(self, watched: WatchedOptimizer) -> None:
        context = self.context
        context.roots()
        named = {context.name(p, f"parameter {n}"): p for n, p in enumerate(watched.parameters)}
        moments, counts = dict[str, Tensor](), dict[str, int]()
        for name, parameter in named.items():
            for key, value in watched.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    moments[f"{key} of {name}"] = value
                elif isinstance(value, (int, float)):
                    counts[f"{key} of {name}"] = zlib.crc32(repr(float(value)).encode())
        generators = generator_states()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators["CUDA"] = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
        with self.recorder.hide():
            weights, state = checksums(_local(named)), checksums(_local(moments))
        self.recorder.write(StepStart(watched.number, watched.steps + 1, weights, state | counts, generators))

    def before_backward(self, losses: Any, *_: Any, **__: Any) -> None:
        loss = losses if isinstance(losses, Tensor) else next((t for t in tensors(losses)), None)
        if loss is not None and loss.numel() == 1:
            with self.recorder.hide():
                self.recorder.write(LossValue(float(loss.detach())))

    def save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        steps, weights = self.context.steps, next(tensors((args[:1], kwargs)), None)
        if weights is None or not steps or self.recorder.in_worker:
            return original(*args, **kwargs)
        enough = self.stop_at_save is not None and self.saved_at is not None and self.saved_at >= self.stop_at_save
        if enough and steps > (self.saved_at or 0):
            self.recorder.file.flush()
            (self.recorder.folder / ENOUGH).touch()
            threading.Event().wait()  # until the audit ends this process, as a power failure would
        result = original(*args, **kwargs)
        self.saved_at = steps
        self.recorder.write(CheckpointSaved(steps))
        return result


def _local(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those that have no data here; of a sharded one the part of this rank."""
    local = {name: t.to_local() if hasattr(t, "to_local") else t.detach() for name, t in named.items()}
    return {name: t for name, t in local.items() if not t.is_meta and not t.is_sparse and t.numel()}
