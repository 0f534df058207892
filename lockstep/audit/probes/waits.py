"""Places in the step where the script waits for the device."""

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..patch import Function, Patches
from ..trace import OURS, Site, foreign
from .context import Context

_WAITING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")


def install(context: Context, patches: Patches) -> None:
    def watched(name: str, original: Function) -> Function:
        def wait(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            of_device = context.recorder.on_gpu or tensor.is_cuda
            if of_device and context.in_loop and not context.in_loader and not context.hidden:
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_code.co_filename.startswith(OURS):  # a watched print, say
                    frame = frame.f_back
                if frame is not None and not foreign(frame.f_code.co_filename):
                    place = Site(frame.f_code.co_filename, frame.f_lineno)
                    context.waits[f"{place.file}:{place.line}:{name.strip('_')}"] += 1
            return original(tensor, *args, **kwargs)

        return wait

    for name in _WAITING:
        patches.wrap(torch.Tensor, name, partial(watched, name))
