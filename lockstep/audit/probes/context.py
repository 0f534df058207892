"""What the probes of one rank share: where in the step the script is, and the names of its parameters."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...watch.drift import checksums
from ...watch.models import assign_names, named_parameters, replicated, root_modules
from ..events import Event, ProbeFailed
from ..patch import Function, Hook, Patches
from ..recorder import Recorder

_P = ParamSpec("_P")
_T = TypeVar("_T")
_VISIBLE = nullcontext()


def never_raises(inspect: Callable[_P, _T], owner: Any = None) -> Callable[_P, _T | None]:
    """Record an exception of the probe itself and return None: it must not end the script. The recorder is that of
    `owner`, or else of the first argument."""
    name = getattr(inspect, "func", inspect).__qualname__

    @functools.wraps(inspect)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return inspect(*args, **kwargs)
        except Exception as error:
            holder: Any = owner or args[0]
            holder.recorder.write(ProbeFailed(name, f"{type(error).__name__}: {error}"[:300]))
            return None

    return guarded


def should_sample(n: int) -> bool:
    """Whether checks that cost time are made in the n-th step."""
    return n in (1, 2, 5, 10) or n % 20 == 0


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has momenta or the like; plain SGD has none."""
    return any(isinstance(v, Tensor) for state in optimizer.state.values() for v in state.values())


@dataclass
class WatchedOptimizer:
    """An optimizer of the script."""

    optimizer: torch.optim.Optimizer
    number: int
    steps: int = 0
    backwards: int = 0  # backward passes since its last step
    stale: bool = False  # whether the gradients of its last step were not cleared
    recorded: int = -1  # the last step after which its weights were recorded
    averages: int = 0  # how often its weights were recorded since all ranks seem to have averaged them

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def rates(self) -> list[float]:
        rates = (group.get("lr") for group in self.optimizer.param_groups)
        return [float(rate) for rate in rates if isinstance(rate, (int, float, Tensor))]  # some have None


class Context:
    """Shared by all probes of a rank."""

    def __init__(self, recorder: Recorder, patches: Patches, limit: int, on_limit: Callable[[], None] | None):
        self.recorder, self.patches, self.limit, self.on_limit = recorder, patches, limit, on_limit
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.wrappers: list[DistributedDataParallel] = []
        self.covered: set[int] = set()  # parameters whose gradients some wrapper synchronises
        self.shards: list[nn.Module] = []  # modules with shards that are plain tensors, as in FSDP's first version
        self.optimizers: list[WatchedOptimizer] = []
        self.steps = 0
        self.backwards = 0
        self.forwards = 0
        self.in_loop = (
            False  # from the first forward pass of training to the end of the loader's pass: there a wait costs
        )
        self.loss_is_scaled = False  # whether a gradient scaler multiplied the loss whose backward pass comes next
        self.reduced = 0  # floating-point numbers that collectives of the script carried since the last step
        self.clipped = False  # whether gradients were clipped since the last step
        self.in_loader = 0
        self.batch: list[Tensor] = []  # the last batch of a loader
        self.reading: tuple[int, int] | None = None  # its loader and how many times that was iterated, until its end
        self.prints = 0
        self.waits: set[tuple[str, int, str]] = set()
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        self._searched_at = -1
        self.on_backward: list[Callable[[], None]] = []
        self.on_step: list[Callable[[], None]] = []
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_pass_end: list[
            Callable[[], None]
        ] = []  # when a loader, with gradients enabled, has given its last batch

    def watch(
        self, owner: Any, name: str, before: Function | None = None, after: Function | None = None, hide: bool = False
    ) -> None:
        """Call `before(...)` and `after(result, ...)` when `owner.name(...)` is called. What they raise is recorded and
        does not reach the script. With `hide` nothing inside the call is recorded."""
        before, after = (never_raises(probe, self) if probe else None for probe in (before, after))

        def around(original: Function, *args: Any, **kwargs: Any) -> Any:
            if before:
                before(*args, **kwargs)
            with self.recorder.hide() if hide else _VISIBLE:
                result = original(*args, **kwargs)
            if after:
                after(result, *args, **kwargs)
            return result

        self.intercept(owner, name, around)

    def intercept(self, owner: Any, name: str, around: Function) -> None:
        """Call `around(original, ...)` in place of `owner.name(...)`, but not inside what is hidden or compiled."""

        def watched(original: Function, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.hidden else around(original, *args, **kwargs)

        self.patches.intercept(owner, name, watched)

    def writes(self, kind: type[Event], *values: Any) -> Function:
        """A probe that records an event, whatever the arguments of the call."""
        return lambda *_, **__: self.recorder.write(kind(*values))

    @never_raises
    def before_forward(self, module: nn.Module, act: Function) -> None:
        """Call `act(module, args, kwargs)` before each forward pass of a module."""
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            self.patches.later(module.register_forward_pre_hook(Hook(act), with_kwargs=True).remove)

    @property
    def hidden(self) -> bool:
        return torch.compiler.is_compiling() or self.recorder.is_hidden

    def roots(self) -> list[nn.Module]:
        """Modules that are no part of another and have parameters, found among all objects."""
        if self._searched_at != len(self.optimizers) + len(self.wrappers):
            self._searched_at = len(self.optimizers) + len(self.wrappers)
            self._search()
        return self._roots

    @never_raises
    def _search(self) -> None:
        with self.recorder.hide():
            found = root_modules()
            new = [m for m in found if all(m is not r for r in self._roots)]
            self._roots = found
            assign_names(found, self._names)  # each keeps the name that it has
        for module in new:
            for act in self.on_root:
                act(module)

    def name(self, tensor: Tensor, default: str = "a tensor of no module") -> str:
        return self._names.get(id(tensor), default)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for module in self.roots():
            with self.recorder.hide():
                named = list(named_parameters(module))
            for _, parameter in named:
                yield self.name(parameter), parameter

    def checksums(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        local = {name: whole for name, t in tensors.items() if (whole := replicated(t)) is not None}
        with self.recorder.hide():
            return checksums(local, positions=False)  # with positions, probes would cost 2 % of a step more on a GPU


def index_of(known: list[Any], item: Any) -> int:
    """The position of an object in a list, by identity; it is appended if it is new."""
    for n, other in enumerate(known):
        if other is item:
            return n
    known.append(item)
    return len(known) - 1
