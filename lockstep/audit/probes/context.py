"""What the probes of one rank know together: where in the step the script is, and which tensors have which name."""

import functools
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...watch.drift import checksums
from ..trace import Recorder

_P = ParamSpec("_P")
_T = TypeVar("_T")


def careful(look: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """A look that fails must not end the script: the record says so, and nothing was seen. For functions whose first
    argument holds the recorder."""

    @functools.wraps(look)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return look(*args, **kwargs)
        except Exception as error:
            recorder: Recorder = args[0].recorder  # type: ignore[attr-defined]
            recorder.write("blind", probe=look.__qualname__, why=f"{type(error).__name__}: {error}"[:300])
            return None

    return guarded


def worth_a_look(n: int) -> bool:
    """Whether the n-th step is one at which what costs something is looked at."""
    return n in (1, 2, 5, 10) or n % 20 == 0


class Context:
    """Shared by all probes of a rank."""

    def __init__(self, recorder: Recorder, limit: int, on_limit: Callable[[], None] | None):
        self.recorder, self.limit, self.on_limit = recorder, limit, on_limit
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.wrappers: list[DistributedDataParallel] = []
        self.covered: set[int] = set()
        """Parameters whose gradients some wrapper synchronises."""
        self.shards: list[nn.Module] = []
        """Modules whose parameters are plain tensors and yet each rank's own part, as FSDP's first version has them."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.steps = 0
        self.backwards = 0
        self.forwards = 0
        self.in_loop = False
        """From the first forward pass of training to the end of the loader's pass: where a wait costs."""
        self.scaler_at_work = False
        """Whether a scaler multiplied the loss whose backward pass comes next."""
        self.collectives = 0
        self.in_loader = 0
        self.given: list[Tensor] = []
        """The batch that a loader gave last."""
        self.loading = 0.0
        self.prints = 0
        self.waits: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        self._known = -1
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_pass_end: list[Callable[[], None]] = []
        """What is done when a loader has given its last batch, with gradients on."""

    @property
    def hidden(self) -> bool:
        return torch.compiler.is_compiling() or self.recorder.is_hidden

    def roots(self) -> list[nn.Module]:
        """Modules that are no part of another and have parameters, found among all objects."""
        if self._known != len(self.optimizers) + len(self.wrappers):
            self._known = len(self.optimizers) + len(self.wrappers)
            self._search()
        return self._roots

    @careful
    def _search(self) -> None:
        with self.recorder.hide():
            modules = [m for m in gc.get_objects() if _is_module(m)]
            parts = {id(child) for m in modules for child in m.children()}
            found = [m for m in modules if id(m) not in parts and next(m.parameters(), None) is not None]
            new = [m for m in found if all(m is not r for r in self._roots)]
            self._roots = found
            self._christen(found)
        for module in new:
            for act in self.on_root:
                act(module)

    def _christen(self, modules: list[nn.Module]) -> None:
        """A name for each parameter, that it keeps, and that no other has."""
        taken = set(self._names.values())
        for module in modules:
            for name, parameter in _named(module):
                if id(parameter) not in self._names:
                    alike = (f"{name} ({n})" for n in count(2))
                    self._names[id(parameter)] = name if name not in taken else next(a for a in alike if a not in taken)
                    taken.add(self._names[id(parameter)])

    def name(self, tensor: Tensor, default: str = "a tensor of no module") -> str:
        return self._names.get(id(tensor), default)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for module in self.roots():
            for _, parameter in _named(module):
                yield self.name(parameter), parameter

    def sums(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        with self.recorder.hide():
            whole = {name: local for name, t in tensors.items() if (local := replicated(t)) is not None}
            return checksums(whole)

    def timed(self, start: float) -> None:
        self.loading += time.perf_counter() - start


def _is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module)  # not isinstance, which asks proxies for their class


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name.replace("_orig_mod.", "").removeprefix("module."), parameter


def replicated(tensor: Tensor) -> Tensor | None:
    """The tensor as every rank should hold it; None for a shard, which is each rank's own."""
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return tensor.to_local() if all(p.is_replicate() for p in placements) else None  # type: ignore[attr-defined]
    if tensor.is_sparse:
        return tensor.detach().coalesce().values()
    return tensor.int_repr() if tensor.is_quantized else tensor
