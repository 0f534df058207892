"""Lines in the step where the script waits for the device."""

from functools import partial
from typing import Any

import torch

from ..source import caller, foreign
from .context import Context

_WAITING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")


def install(context: Context) -> None:
    for name in _WAITING:
        context.watch(torch.Tensor, name, partial(_waits, context, name.strip("_")))


def _waits(context: Context, name: str, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if (context.recorder.on_gpu or tensor.is_cuda) and context.in_loop and not context.in_loader:
        at = caller()
        if not foreign(at.file):
            context.waits.add((*at, name))
