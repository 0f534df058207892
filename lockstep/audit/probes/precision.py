"""Autocast, gradient scalers and clipping, in the order they are used."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..events import Autocast, Clip, Scaler
from ..patch import Function
from .context import Context, index_of


def install(context: Context) -> None:
    probe = Precision(context)
    context.watch(torch.autocast, "__enter__", probe.autocast)
    for name in ("__init__", "scale", "unscale_", "step", "update"):
        context.watch(torch.amp.GradScaler, name, after=partial(probe.scaler_called, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (clip_grad, torch.nn.utils):
            context.intercept(owner, name, probe.clip)


class Precision:
    """State of the probes of one rank's mixed precision."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.dtypes: set[str] = set()
        self.scalers: list[Any] = []

    def clip(self, original: Function, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """A norm over shards that are plain tensors is another one on each rank."""
        mine = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        with self.recorder.hide():
            shards = {id(p) for module in self.context.shards if _is_sharded(module) for p in module.parameters()}
        self.context.clipped, self.context.reduced = True, 0
        self.recorder.write(Clip(any(id(p) in shards for p in mine)))
        with self.recorder.hide():
            return original(mine, *args, **kwargs)

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


def _is_sharded(module: nn.Module) -> bool:
    strategy = getattr(module, "sharding_strategy", None)
    return getattr(strategy, "name", "") != "NO_SHARD"
