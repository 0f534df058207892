"""Lines in the step where the script waits for the device."""

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..source import OURS, foreign
from .context import Context

_WAITING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")


def install(context: Context) -> None:
    for name in _WAITING:
        context.watch(torch.Tensor, name, partial(_waits, context, name.strip("_")))


def _waits(context: Context, name: str, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if (context.recorder.on_gpu or tensor.is_cuda) and context.in_loop and not context.in_loader:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None and not foreign(frame.f_code.co_filename):
            context.waits.add((frame.f_code.co_filename, frame.f_lineno, name))
