"""Autocast, gradient scalers and clipping, in the order they are used."""

from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ..patch import Function, Patches
from .context import Context


def install(context: Context, patches: Patches) -> None:
    probe = Precision(context)
    patches.wrap(torch.autocast, "__enter__", probe.autocast)
    scaler = torch.amp.GradScaler
    patches.wrap(scaler, "__init__", probe.scaler)
    for name in ("scale", "unscale_", "step", "update"):
        patches.wrap(scaler, name, partial(probe.scaling, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (clip_grad, torch.nn.utils):
            patches.wrap(owner, name, probe.clip)


class Precision:
    """State of the probes of one rank's mixed precision."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.dtypes: set[str] = set()
        self.scalers: list[Any] = []

    def autocast(self, original: Function) -> Function:
        def __enter__(region: Any) -> Any:
            if not torch.compiler.is_compiling() and region._enabled and torch.is_grad_enabled():
                dtype = str(getattr(region, "asked_dtype", region.fast_dtype)).removeprefix("torch.")
                if dtype not in self.dtypes and not self.recorder.is_hidden:
                    self.dtypes.add(dtype)
                    self.recorder.write("autocast", dtype=dtype)
            return original(region)

        return __enter__

    def scaler(self, original: Function) -> Function:
        def __init__(scaler: Any, /, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            self.scalers.append(scaler)
            self.recorder.write("scaler", op="new", n=len(self.scalers) - 1, enabled=scaler.is_enabled())

        return __init__

    def scaling(self, name: str, original: Function) -> Function:
        def act(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.context.hidden or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            number = next((n for n, s in enumerate(self.scalers) if s is scaler), -1)
            if name == "scale":
                self.context.scaler_at_work = True
            self.recorder.write("scaler", op=name, n=number)
            result = original(scaler, *args, **kwargs)
            if name == "update":
                with self.recorder.hide():
                    self.recorder.write("scale", n=number, value=scaler.get_scale())
            return result

        return act

    def clip(self, original: Function) -> Function:
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not self.context.hidden:
                self.recorder.write("clip")
            with self.recorder.hide():
                return original(*args, **kwargs)

        return clip
