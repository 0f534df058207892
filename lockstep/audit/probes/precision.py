"""Autocast, gradient scalers and clipping, in the order they are used."""

from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ..events import Autocast, Clip, Scaler
from .context import Context, index_of
from .patch import Function


def install(context: Context) -> None:
    probe = Precision(context)
    context.watch(torch.autocast, "__enter__", probe.autocast)
    context.watch(torch.amp.GradScaler, "__init__", probe.new_scaler)
    for name in ("scale", "unscale_", "step", "update"):
        context.watch(torch.amp.GradScaler, name, partial(probe.scaler, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (clip_grad, torch.nn.utils):
            context.watch(owner, name, probe.clip)


class Precision:
    """State of the probes of one rank's mixed precision."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.dtypes: set[str] = set()
        self.scalers: list[Any] = []

    def autocast(self, original: Function, region: Any) -> Any:
        if region._enabled and torch.is_grad_enabled():
            dtype = str(getattr(region, "asked_dtype", region.fast_dtype)).removeprefix("torch.")
            if dtype not in self.dtypes:
                self.dtypes.add(dtype)
                self.recorder.write(Autocast(dtype))
        return original(region)

    def new_scaler(self, original: Function, scaler: Any, /, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        self.recorder.write(Scaler("__init__", index_of(self.scalers, scaler)))

    def scaler(self, op: str, original: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        event = Scaler(op, index_of(self.scalers, scaler))
        self.context.loss_is_scaled |= op == "scale"
        if op != "update":
            self.recorder.write(event)
        result = original(scaler, *args, **kwargs)
        if op == "update":
            with self.recorder.hide():
                event.scale = scaler.get_scale()
            self.recorder.write(event)
        return result

    def clip(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self.recorder.write(Clip())
        with self.recorder.hide():
            return original(*args, **kwargs)
