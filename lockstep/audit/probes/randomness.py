"""Random tensors drawn while training: the same numbers on every rank are the same noise on different samples."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..patch import Function, Patches
from .context import Context, careful, worth_a_look
from .tensors import readable

_FUNCTIONS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
_FEWEST = 8
"""One number may be a decision that all ranks take together; a tensor of them is noise."""
_PER_STEP = 3


def install(context: Context, patches: Patches) -> None:
    drawn = {"step": -1, "count": 0}

    def watched(name: str, original: Function) -> Function:
        def draw(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if context.hidden or context.in_loader or context.recorder.in_worker or not context.forwards:
                return result
            step = context.steps + 1
            if step != drawn["step"]:
                drawn.update(step=step, count=0)
            known = isinstance(result, Tensor) and readable(result) and result.numel() >= _FEWEST
            if known and torch.is_grad_enabled() and worth_a_look(step) and drawn["count"] < _PER_STEP:
                drawn["count"] += 1
                _noise(context, result, fn=name, step=step, n=drawn["count"])
            return result

        return draw

    for name in _FUNCTIONS:
        patches.wrap(torch, name, partial(watched, name))
        _let_scripts_call(getattr(torch, name), f"aten::{name}", patches)


def _let_scripts_call(watched: Function, operator: str, patches: Patches) -> None:
    """TorchScript knows torch's functions by their ids."""
    table = torch.jit._builtins._get_builtin_table()
    table[id(watched)] = operator
    patches.later(lambda: table.pop(id(watched)))


@careful
def _noise(context: Context, drawn: Tensor, **seen: Any) -> None:
    total = context.sums({"drawn": drawn})["drawn"]
    context.recorder.write("draw", shape=list(drawn.shape), sum=total, **seen)
