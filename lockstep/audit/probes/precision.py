"""Autocast, gradient scalers and clipping, in the order they are used."""

from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ..events import Autocast, Clip, Scaler
from .context import Context, index_of


def install(context: Context) -> None:
    probe = Precision(context)
    context.watch(torch.autocast, "__enter__", probe.autocast)
    for name in ("__init__", "scale", "unscale_", "step", "update"):
        context.watch(torch.amp.GradScaler, name, after=partial(probe.scaler_called, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (clip_grad, torch.nn.utils):
            context.watch(owner, name, context.writes(Clip), hide=True)


class Precision:
    """State of the probes of one rank's mixed precision."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.dtypes: set[str] = set()
        self.scalers: list[Any] = []

    def autocast(self, region: Any) -> None:
        dtype = str(getattr(region, "asked_dtype", region.fast_dtype)).removeprefix("torch.")
        if region._enabled and torch.is_grad_enabled() and dtype not in self.dtypes:
            self.dtypes.add(dtype)
            self.recorder.write(Autocast(dtype))

    def scaler_called(self, op: str, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            self.context.loss_is_scaled |= op == "scale"
            with self.recorder.hide():
                scale = scaler.get_scale() if op == "update" else None
            self.recorder.write(Scaler(op, index_of(self.scalers, scaler), scale))
