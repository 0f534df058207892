"""Random tensors drawn while training: the same numbers on every rank are the same noise on different samples."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..events import RandomDraw
from ..patch import Function, Patches
from .context import Context, should_sample
from .tensors import readable

_FUNCTIONS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
_FEWEST = 8
"""One number may be a decision that all ranks take together; a tensor of them is noise."""
_PER_STEP = 3


def install(context: Context) -> None:
    probe = Randomness(context)
    for name in _FUNCTIONS:
        context.watch(torch, name, after=partial(probe.drawn, name))
        _register_with_torchscript(getattr(torch, name), f"aten::{name}", context.patches)


class Randomness:
    """State of the probes of one rank's random draws."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.step, self.count = -1, 0  # the current step, and how many draws of it were recorded

    def drawn(self, name: str, result: Any, *_: Any, **__: Any) -> None:
        context = self.context
        if context.in_loader or self.recorder.in_worker or not context.forwards or not torch.is_grad_enabled():
            return
        step = context.steps + 1
        if step != self.step:
            self.step, self.count = step, 0
        known = should_sample(step) and self.count < _PER_STEP and isinstance(result, Tensor)
        if known and readable(result) and result.numel() >= _FEWEST:
            self.count += 1
            checksum = context.checksums({"drawn": result})["drawn"]
            self.recorder.write(RandomDraw(step, self.count, name, list(result.shape), checksum))


def _register_with_torchscript(watched: Function, operator: str, patches: Patches) -> None:
    """TorchScript knows torch's functions by their ids."""
    table = torch.jit._builtins._get_builtin_table()
    table[id(watched)] = operator
    patches.later(lambda: table.pop(id(watched)))
