"""Sums of gradients without an order: the same bits on any number of ranks.

The global batch is cut into tiles, and each tile's gradient is rounded onto a grid: multiples of a power of two, one
for each tensor. Whole multiples are added up as int32. Integer addition has no rounding, so it makes no difference
which rank has which tile, nor in what order an all-reduce adds.

The grid of a step follows from the largest tile gradient of the steps before, with room to grow 16-fold. A gradient
that does not fit is seen by all ranks alike, and the step is done again on a coarser grid.

    sums.start_step()
    sums.add(gradients, last)           after the backward pass of each tile; the last one's memory then holds int32
    sums.finish_step()                  makes floats of the integers, which have been summed over the ranks
    sums.overflowed()                   waits until the device has come here; True: do the step again
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .distributed import RunFailed, World

HEADROOM = 4
"""Bits by which a gradient may grow from one step to the next."""
FALL = 8
"""Bits by which the grid gets finer from one step to the next, at most: the next gradient may be large again."""
DEPTH = 30
"""The finest grid is this many bits below that of the tensor with the largest gradient."""
SHAPES = 64
"""A compiled exact run has a graph for each shape of its input, up to this many."""
INF = 0x7F800000
"""The bits of a float32 infinity; those of NaN are above, those of finite numbers below."""
_NEVER = -(1 << 20)
"""The exponent of a tensor that has had no gradient."""
Numbered = list[tuple[int, Tensor]]
"""Gradients, each with the number of its parameter."""


def choose_kernels(exact: bool, device: torch.device, compiled: bool) -> None:
    """Exact: choose kernels by shape alone, never by time, and only those that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = not exact  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not exact and device.type == "cuda"
    if device.type == "cpu" and exact:
        torch.set_num_threads(1)  # sums of a kernel are cut by the number of threads
    if compiled:
        _configure_compiler(exact)


@contextmanager
def kernels_restored() -> Iterator[None]:
    """Put torch's settings back after the block: a script may go on after an exact run."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    benchmark, inductor = torch.backends.cudnn.benchmark, sys.modules.get("torch._inductor.config")
    compiler = inductor is not None and inductor.deterministic  # by the script's own wish
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        if "torch._dynamo" in sys.modules and not compiler:
            _configure_compiler(False)


class NotDeterministic(RunFailed):
    """An operator of the model has no version that gives the same bits each time."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Say in one line which operator of an exact run has no deterministic version, or that it has too many shapes."""
    try:
        yield
    except Exception as error:
        operator, found, _ = str(error).partition(" does not have a deterministic implementation")
        if found:
            raise NotDeterministic(
                f"--exact: {operator.split()[-1]} has no deterministic version on this device; use another operator in "
                "the model, or train without --exact"
            ) from None
        if type(error).__name__ == "FailOnRecompileLimitHit":  # its module is imported where something is compiled
            raise RunFailed(
                f"--exact: more than {SHAPES} shapes of the input were compiled, each on its own; pad the input to "
                "fewer shapes, or use --compile off"
            ) from None
        raise


def _configure_compiler(exact: bool) -> None:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    inductor.deterministic = exact
    dynamo.optimize_ddp = not exact  # it cuts the graph where there are several ranks, and only there
    # Every shape has a graph of its own. Past the limit new shapes would not be compiled: which, depends on the rank.
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = (SHAPES, True) if exact else (8, False)


@dataclass
class Exactness:
    """Whether a run is exact: the tile it began with, what it runs on, and what has broken it so far."""

    tiles: int
    environment: dict[str, str]
    breaks: list[str] = field(default_factory=list)
    """From each of these on, the bits are no longer those of a run without it."""

    def record(self, why: str) -> None:
        self.breaks.append(why)

    def cut_tiles(self, tiles: int, step: int) -> None:
        """Record that memory did not suffice for a tile at `step`, and into how many the batch is cut from there on."""
        self.record(f"step {step}: {self.tiles} tiles became {tiles} for lack of memory")
        self.tiles = tiles

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run that was exact; another environment than it began with is a break."""
        self.breaks = [*state["breaks"], *self.breaks]
        for name, before in state["environment"].items():
            now = self.environment.get(name)
            if now != before:
                self.breaks.append(f"{name} was {before} up to the last checkpoint, and is {now}")


def environment(world: World) -> dict[str, str]:
    """Return what the bits of a kernel depend on besides its input."""
    found = {"torch": str(torch.__version__)}
    if world.device.type == "cuda":
        found |= {"GPU": torch.cuda.get_device_name(world.device), "CUDA": str(torch.version.cuda)}
        return found | {"cuDNN": str(torch.backends.cudnn.version())}
    return found | {"CPU": torch.backends.cpu.get_cpu_capability()}


def compare_environments(tiles: int, own: dict[str, str], world: World) -> tuple[Exactness, list[str]]:
    """Return a record of what breaks an exact run, and in what the ranks' environments differ."""
    ranks = world.broadcast(world.gather(own))
    exactness, different = Exactness(tiles, own), [n for n in own if len({r[n] for r in ranks}) > 1]
    if different:
        exactness.record(f"ranks differ in {', '.join(different)}")
    return exactness, different


class Observer(Protocol):
    """What is told of the gradients of a step on their way into the sums."""

    def start_step(self) -> None: ...
    def start_tile(self, number: int) -> None: ...
    def add_tile(self, gradients: Numbered, scales: Tensor) -> None: ...
    def add_sums(self, integers: Numbered) -> None: ...


class StartsStep(Protocol):
    """What is told that a step begins."""

    def start_step(self) -> None: ...


class ExactSums:
    """The sums of the gradients of one step, and the grid they are rounded onto."""

    def __init__(self, parameters: Iterable[nn.Parameter], world: World):
        self.parameters, self.world = list(parameters), world
        self.number: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self.parameters)}
        self.bits = 30
        """A tile's value on the grid is below 2^bits, so that the sum over all tiles is below 2^31."""
        count, device = len(self.parameters), world.device
        self.exponents = torch.zeros(count, dtype=torch.int32, device=device)
        """Of each tensor: its gradients were below 2^exponent."""
        self.known = False
        """Whether there is a grid: from a first pass, or from a checkpoint."""
        self.largest = torch.zeros(count, dtype=torch.int32, device=device)
        """Of each tensor, the largest absolute value in a tile's gradient of this step, as the bits of a float32."""
        self._integers: dict[int, Tensor] = {}
        """What tiles before the last have added up, by number of the parameter."""
        self._add, self._to_floats = _kernels(device)
        self.observer: Observer | None = None
        self.by_rows: list[StartsStep] = []
        """With --shard full: what sums gradients, by rows, whenever a tile has made them."""
        self.start_step()

    def set_tiles(self, tiles: int) -> None:
        self.bits = 31 - (tiles - 1).bit_length()

    def start_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None  # also of those that are not in the optimizer, which nothing else empties
        self.largest.zero_()
        self._integers = {}
        for unit in self.by_rows:
            unit.start_step()
        self._exponents_in_use = self._grid()
        self.scales = _power_of_two(self.bits - HEADROOM - self._exponents_in_use)
        if self.observer is not None:
            self.observer.start_step()

    def add(self, gradients: Numbered, last: bool) -> None:
        """Add one tile's gradients. With the last tile's, the sum is written as int32 into their own memory."""
        if self.observer is not None:
            self.observer.add_tile(gradients, self.scales)
        totals = [
            gradient.view(torch.int32) if last else self._integers.get(i, torch.empty_like(gradient, dtype=torch.int32))
            for i, gradient in gradients
        ]
        self._add(gradients, [self._integers.get(i) for i, _ in gradients], totals, self.scales, self.largest)
        if not last:
            self._integers |= {i: total for (i, _), total in zip(gradients, totals, strict=True)}

    def add_local(self, last: bool) -> None:
        """Add the gradients that a backward pass has left in the parameters of this rank."""
        if self.by_rows:
            return
        self.add(self.gradients(), last)
        for i, parameter in enumerate(self.parameters):
            if not last:
                parameter.grad = None
            elif parameter.grad is None and i in self._integers:  # the last tile did not use it, another one did
                parameter.grad = self._integers[i].view(torch.float32)

    def finish_step(self) -> None:
        """Turn the integers in the parameters' gradients into floats, and make the next grid."""
        if self.world.size > 1:
            dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        finite = (self.largest < INF).all()
        units = _power_of_two(self._exponents_in_use + HEADROOM - self.bits)
        self._times(torch.where(finite, units, torch.nan))
        first = (self.exponents < _NEVER // 2) & (self.largest > 0)  # a guess was the grid of these
        self._align_gradients()
        self.overflow = finite & (first.any() | ~self.fits())
        """On the device: all gradients are finite, but some do not fit the grid. All ranks see the same."""
        self._follow()
        self._overflow_on_host = self.overflow.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if self.world.device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    def _times(self, units: Tensor) -> None:
        """Turn integers in the gradients into floats; the sums by rows are floats already."""
        if not self.by_rows:
            self._to_floats(self.gradients(), units)
        for parameter, unit in zip(self.parameters, units, strict=True) if self.by_rows else ():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(unit)  # type: ignore[attr-defined]

    def fits(self) -> Tensor:
        """Return whether all gradients so far fit the grid, on the device; one that is not finite does not."""
        return (self.largest.view(torch.float32) * self.scales < 0.99 * 2.0**self.bits).all()

    def integers(self) -> Numbered:
        """Return what is in the parameters' gradients between the all-reduce and `finish_step`."""
        return [(i, gradient.view(torch.int32)) for i, gradient in self.gradients()]

    def overflowed(self) -> bool:
        """Return whether the last step is to be done again; waits until the device has come to its end."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._overflow_on_host)

    def set_grid(self) -> None:
        """Make the first grid from what has been added since `start_step`; nothing of it is kept otherwise."""
        if self.world.size > 1:
            dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        self.exponents.fill_(_NEVER)
        self._follow()
        self.known = True

    def _follow(self) -> None:
        """Move the grid after the largest gradients: up at once, down by up to FALL bits per step."""
        seen = torch.where(self.largest > 0, torch.frexp(self.largest.view(torch.float32)).exponent, _NEVER)
        wanted = torch.where(seen > _NEVER, torch.maximum(seen, self.exponents - FALL), self.exponents)
        self.exponents = torch.where((self.largest < INF).all(), wanted, self.exponents).to(torch.int32)

    def _grid(self) -> Tensor:
        """Return the exponents in use: a tensor without a gradient so far may get one as large as any other's."""
        top = self.exponents.max()
        known = torch.where(self.exponents > _NEVER // 2, self.exponents, top)
        return torch.maximum(known, top - DEPTH).clamp(-90, 127)

    def _align_gradients(self) -> None:
        """Copy gradients that begin at odd places of a DDP bucket: their norm would be added up in another order."""
        for parameter in self.parameters if self.world.size > 1 and not self.by_rows else ():
            if parameter.grad is not None and parameter.grad.data_ptr() % 16:
                parameter.grad = parameter.grad.clone()

    def gradients(self) -> Numbered:
        return [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]

    def state_dict(self) -> dict[str, Tensor]:
        return {"exponents": self.exponents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.exponents.copy_(state["exponents"])
        self.known = True


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, exactly."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _kernels(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    if device.type == "cuda":
        from .exact_cuda import add_tile, to_floats

        return add_tile, to_floats
    return _add_tile, _to_floats


def _add_tile(
    gradients: Numbered, before: list[Tensor | None], totals: list[Tensor], scales: Tensor, largest: Tensor
) -> None:
    """Write before + round(gradient × scale) into each total, and raise `largest` to the largest gradient."""
    for (i, gradient), old, total in zip(gradients, before, totals, strict=True):
        if gradient.numel():
            size = gradient.abs().max().view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
            largest[i] = torch.maximum(largest[i], size)
            rounded = (gradient * scales[i]).round_().to(torch.int32)
            total.copy_(rounded if old is None else rounded.add_(old))


def _to_floats(gradients: Numbered, units: Tensor) -> None:
    """Multiply the integers in the gradients' memory by the units of the grid."""
    for i, gradient in gradients:
        gradient.copy_(gradient.view(torch.int32) * units[i])
