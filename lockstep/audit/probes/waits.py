"""Lines in the step where the script waits for the device."""

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..source import OURS, foreign
from .context import Context
from .patch import Function

_WAITING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")


def install(context: Context) -> None:
    for name in _WAITING:
        context.watch(torch.Tensor, name, partial(_wait, context, name.strip("_")))


def _wait(context: Context, name: str, original: Function, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if (context.recorder.on_gpu or tensor.is_cuda) and context.in_loop and not context.in_loader:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None and not foreign(frame.f_code.co_filename):
            context.waits.add((frame.f_code.co_filename, frame.f_lineno, name))
    return original(tensor, *args, **kwargs)
