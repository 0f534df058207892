"""The arithmetic of a step: micro-batch × accumulation × world = global batch."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from .config import Data
from .outcome import OutOfMemory
from .stream import Slice


class Position(NamedTuple):
    """A place in an iterable data set. Equal on all ranks."""

    epoch: int = 0
    number: int = 0
    """Of the next item, in its epoch."""
    before: str = ""
    """A hash of the item before it."""


class MicroBatch(NamedTuple):
    """What one rank puts through the model at once."""

    batch: Any
    epochs: Tensor
    indices: Tensor
    """Which samples these are, (n,) int64; with their epochs they are the keys of their randomness."""
    samples: Slice
    """The same on the host, for the ledger."""
    number: int
    """Its place among all ranks' micro-batches of the step; in an exact run the number of the tile."""
    last: bool
    """Whether it is the last of its step on this rank: the one that synchronises gradients."""
    error: str | None = None
    """What went wrong in a loader process, if anything."""
    next_item: Position | None = None
    """Of an iterable data set: where the next step begins."""


@dataclass(frozen=True)
class Batching:
    """How a run's data are cut into steps."""

    dataset: int | None
    """Samples in an epoch; None for an iterable data set that does not know it."""
    micro_batch: int
    accumulation: int
    world: int
    global_batch: int
    n_steps: int
    tiles: int | None = None
    """Of an exact run: the pieces that a global batch is cut into, the same on any world."""
    steps_per_batch: int = 1
    """Steps in a row that use the same global batch; more than one only where several optimizers take turns."""

    @classmethod
    def plan(
        cls,
        data: Data,
        dataset: int | None,
        world: int,
        resumed_global_batch: int | None = None,
        smoke: int | None = None,
        steps_per_batch: int = 1,
    ) -> "Batching":
        """Return the sizes that the settings ask for; those of a resumed run's global batch hold on any world."""
        fixed = data.global_batch_size or resumed_global_batch
        if resumed_global_batch and fixed != resumed_global_batch:
            raise ValueError(
                f"the run to resume has a global batch of {resumed_global_batch}; it cannot go on with {fixed}"
            )
        global_batch = fixed or data.batch_size * world * max(1, data.gradient_accumulation_steps)
        if global_batch < world:
            raise ValueError(f"a global batch of {global_batch} is too small for {world} ranks; start fewer")
        if dataset is not None and dataset < global_batch:
            raise ValueError(
                f"the training set has {dataset} samples, fewer than the global batch of {global_batch}; "
                "lower --batch_size or --global_batch_size"
            )
        n_steps = data.n_steps
        if data.epochs is not None and dataset is None:
            raise ValueError("the iterable data set has no __len__, so an epoch has no known length: give --n_steps")
        if data.epochs is not None and dataset is not None:
            n_steps = -(-data.epochs * dataset // global_batch) * steps_per_batch
        if n_steps is None:
            raise ValueError("say how long to train: --n_steps or --epochs")
        micro_batch, accumulation = _cut(global_batch, world, data.batch_size)
        length = min(n_steps, smoke or n_steps)
        return cls(dataset, micro_batch, accumulation, world, global_batch, length, steps_per_batch=steps_per_batch)

    def in_tiles(self, tiles: int) -> "Batching":
        """Return the same global batch cut into so many tiles."""
        if tiles < self.world:
            raise ValueError(
                f"the global batch of this exact run is cut into {tiles} tile(s), too few for {self.world} ranks: "
                f"start up to {tiles}, or begin a run with a smaller --batch_size"
            )
        micro_batch, accumulation = -(-self.global_batch // tiles), -(-tiles // self.world)
        return replace(self, micro_batch=micro_batch, accumulation=accumulation, tiles=tiles)

    def own(self, rank: int) -> range:
        """Return the numbers of a rank's micro-batches among those of all ranks."""
        if self.tiles:
            return range(self.tiles * rank // self.world, self.tiles * (rank + 1) // self.world)
        return range(rank * self.accumulation, (rank + 1) * self.accumulation)

    def halved(self) -> "Batching":
        """Return the same global batch cut into micro-batches of half the size, as memory did not suffice for these."""
        if self.micro_batch == 1:
            raise OutOfMemory("there is not enough memory for a single sample; use a smaller model or input")
        if self.tiles:
            return self.in_tiles(min(2 * self.tiles, self.global_batch))
        micro_batch = -(-self.micro_batch // 2)
        share = -(-self.global_batch // self.world)
        return replace(self, micro_batch=micro_batch, accumulation=-(-share // micro_batch))

    def describe_halving(self, before: "Batching", step: int) -> str:
        """Return what is said when micro-batches become smaller at a step."""
        return (
            f"out of memory at step {step}: micro-batch {before.micro_batch} -> {self.micro_batch}, "
            f"accumulation {before.accumulation} -> {self.accumulation}; the global batch stays {self.global_batch}"
        )

    @property
    def divides_evenly(self) -> bool:
        return self.micro_batch * (self.tiles or self.accumulation * self.world) == self.global_batch

    def span(self, number: int) -> range:
        """Return the places in the global batch of a micro-batch, by its number among those of all ranks."""
        if self.tiles:
            return range(self.global_batch * number // self.tiles, self.global_batch * (number + 1) // self.tiles)
        rank, i = divmod(number, self.accumulation)
        first, stop = (self.global_batch * r // self.world for r in (rank, rank + 1))
        start, end = (first + (stop - first) * j // self.accumulation for j in (i, i + 1))
        return range(start, end)

    @property
    def steps_per_epoch(self) -> float:
        if self.dataset is None:
            raise ValueError(
                "the iterable data set has no __len__, so an epoch has no known length: give steps instead"
            )
        return self.dataset * self.steps_per_batch / self.global_batch

    def epochs(self, step: int) -> dict[str, float]:
        """Return, for the log, where in the epochs a step is; nothing where their length is not known."""
        return {} if self.dataset is None else {"epoch": step / self.steps_per_epoch}

    def samples(self, steps: int) -> float:
        """Return how many samples so many steps use up."""
        return steps * self.global_batch / self.steps_per_batch

    def positions(self, step: int) -> list[int]:
        """Return the first position in the stream of a step's samples, and the one after the last."""
        batch = step // self.steps_per_batch
        return [batch * self.global_batch, (batch + 1) * self.global_batch]

    def every(self, interval: str) -> int:
        """Return an interval of the settings in steps: `500`, or `2ep` for two epochs."""
        if interval.endswith("ep"):
            epochs = float(interval[:-2])
            return max(1, round(epochs * self.steps_per_epoch)) if epochs else 0
        return int(interval)


def _cut(global_batch: int, world: int, largest: int) -> tuple[int, int]:
    """Return micro-batch and accumulation of the rank with the largest share."""
    share = -(-global_batch // world)
    accumulation = -(-share // largest)
    return -(-share // accumulation), accumulation
