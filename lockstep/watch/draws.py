"""Random numbers that a loss does not take from `rng`: which lines draw them.

They come from generators of the process, and so depend on how the global batch is cut: another number of ranks draws
others. torch's are seeded for each micro-batch, so that in an exact run, which is cut alike on any number of ranks,
they are the same too; those of numpy and of Python's random never are.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_DRAWS = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_",
}  # fmt: skip
_DROPOUT = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_ENGINE = Path(__file__).resolve().parents[1]
_RECIPES = str(_ENGINE / "recipes")
_NOT_CALLERS = (str(_ENGINE), str(Path(torch.__file__).resolve().parent))


@dataclass
class Draws:
    """Draws of one forward pass that are not keyed: by place, such as `model.py:31`, what is called there."""

    dropout: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    outside_torch: list[str] = field(default_factory=list)
    """Modules whose global generator was used."""

    def notes(self, exact: bool) -> list[str]:
        """Return what a user should know about them."""
        found = []
        if self.dropout and not exact:
            found.append(
                f"{_list(self.dropout)}: masks are drawn for each micro-batch, and are others on another number of "
                "ranks; with --exact they are the same"
            )
        if self.others and not exact:
            found.append(
                f"{_list(self.others)}: these random numbers are not keyed by sample, and are others on another number "
                "of ranks; take them from rng (rng.normal, rng.uniform, ...), or train with --exact"
            )
        if self.outside_torch:
            found.append(
                f"loss() draws from {' and '.join(self.outside_torch)}: each rank draws numbers of its own, and a "
                "resumed run others; take them from rng"
            )
        return found


def _list(places: Mapping[str, str]) -> str:
    shown = [f"{name} at {place}" for place, name in list(places.items())[:4]]
    return ", ".join(shown) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


class _Recorder(TorchFunctionMode):
    def __init__(self, draws: Draws):
        super().__init__()
        self.draws = draws

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _DRAWS:
            self.draws.others.setdefault(_caller(), name)
        elif (name in _DROPOUT and _drops(args, kwargs)) or (name in _ATTENTION and kwargs.get("dropout_p", 0.0) > 0):
            self.draws.dropout.setdefault(_caller(), "dropout")
        return func(*args, **kwargs)


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of dropout(input, p, training, ...) drops anything."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return bool(training) and p > 0


def _caller() -> str:
    """Return file and line of the innermost call that is neither in torch nor in the engine."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_RECIPES) or not file.startswith(_NOT_CALLERS):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextmanager
def recording_draws() -> Iterator[Draws]:
    """Record the draws of the block, which is not compiled."""
    draws, python, numpy = Draws(), random.getstate(), _numpy_state()
    with _Recorder(draws):
        yield draws
    if random.getstate() != python:
        draws.outside_torch.append("random")
    if _numpy_state() != numpy:
        draws.outside_torch.append("numpy.random")


def _numpy_state() -> str:
    state = np.random.get_state(legacy=False)
    return repr((state, state["state"]["key"].tobytes()))
