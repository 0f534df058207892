"""One objective on many ranks. The only file that names DistributedDataParallel."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .distributed import World

# The option that broadcasts buffers at every forward pass has another name since torch 2.13.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass
class Replica:
    """This rank's copy of the objective, as the step uses it."""

    forward: Callable[..., Any]
    """Call this, never the objective itself: gradients are synchronised on the way back."""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """Within it, backward adds up gradients on this rank alone."""


def wrap(objective: nn.Module, world: World, compile: bool) -> Replica:
    """Synchronise the objective's gradients over the world, and compile it."""
    if world.size == 1:
        return Replica(torch.compile(objective) if compile else objective, nullcontext)
    ddp = DistributedDataParallel(
        objective,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # A static graph finds unused parameters by itself, but its hooks do not go together with compiled graphs,
        # which Dynamo cuts at bucket borders so that communication still overlaps with the backward pass.
        static_graph=not compile,
        **{_SYNC_BUFFERS: _has_batch_norm(objective)},  # type: ignore[arg-type]
    )
    if compile:
        return Replica(torch.compile(ddp), ddp.no_sync)
    return Replica(ddp, _no_sync_but_once(ddp))


def _no_sync_but_once(ddp: DistributedDataParallel) -> Callable[[], AbstractContextManager[Any]]:
    """A static graph is learnt from the first backward pass, which therefore has to be a synchronised one."""
    learnt = False

    def no_sync() -> AbstractContextManager[Any]:
        nonlocal learnt
        first, learnt = not learnt, True
        return nullcontext() if first else ddp.no_sync()

    return no_sync


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
