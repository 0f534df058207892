"""The data of a loop of one's own: this rank's micro-batches, the position in the data set, and the samples used."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .batching import Batching, MicroBatch, Position
from .config import Data
from .distributed import World
from .evaluate import samples_of
from .exact import Exactness
from .loader import Fetch, Loader, Preparation, Reader, is_iterable, requests, size_of
from .rng import Rng
from .stream import Slice, Stream
from .watch.data import DataWatch, Samples, digest
from .watch.ledger import Ledger


class Feed:
    """One training set, map-style or iterable, cut into global batches and micro-batches."""

    def __init__(self, world: World, seed: int, say: Callable[[str], None]):
        self.world, self.seed, self.say = world, seed, say
        self.facts: dict[str, Any] = {"seed": seed}
        """What determines the order of the samples; and, of an iterable set, where the next step begins."""
        self.batching: Batching | None = None
        self.exactness: Exactness | None = None
        """Of an exact run: the tiles that a global batch is cut into, and what has broken it."""
        self.micro: MicroBatch | None = None
        """The micro-batch in hand."""
        self.ledger, self.data_watch = Ledger(0), DataWatch(world, {}, seed)
        self.used: list[Slice] = []
        """Samples of steps that were done since the last check."""
        self._in_hand: list[Slice] = []
        self._resumed_ledger: dict[str, Any] = {}
        self._load: Callable[[int], Loader] | None = None
        """Return what loads the micro-batches from a step on, as they are cut now."""

    def open(self, dataset: Any, length: Data, preparation: Preparation, workers: int | None, step: int) -> Batching:
        """Begin to load micro-batches from `step` on; return how they are cut."""
        iterable = is_iterable(dataset)
        if (length.n_steps is None) == (length.epochs is None):
            raise ValueError("say how long to train: n_steps or epochs, one of the two")
        global_batch = length.global_batch_size or length.batch_size
        if (size := size_of(dataset)) is None and length.n_steps is None:
            raise ValueError("an iterable data set has no known length: say how long to train by n_steps")
        self.batching = self._plan(length, size)
        self.continue_with({"global_batch": global_batch, "dataset": size})
        self._watch(samples_of(dataset), size or 0)
        self._load = partial(self._open_loader, dataset, preparation, workers, None if iterable else size)
        self.loader = self._load(step)
        return self.batching

    def _plan(self, length: Data, size: int | None) -> Batching:
        batching = Batching.plan(length, size, self.world.size)
        if self.exactness is None:
            return batching
        self.exactness.tiles = self.exactness.tiles or -(-batching.global_batch // length.batch_size)
        return batching.in_tiles(self.exactness.tiles)

    def _open_loader(
        self, dataset: Any, preparation: Preparation, workers: int | None, size: int | None, step: int
    ) -> Loader:
        batching = self.batching
        assert batching is not None
        if size is None:
            first = Position(*self.facts.get("next_item", ()))
            reader = Reader(dataset, preparation, batching, self.world.rank, first, digest)
            return Loader(reader, self.world, workers)
        wanted = requests(Stream(size, batching.global_batch, self.seed), self.world, batching, step)
        return Loader(Fetch(dataset, preparation), self.world, workers, requests=wanted)

    def halve(self, step: int) -> None:
        """Load the step anew in micro-batches of half the size, as memory did not suffice on some rank."""
        assert self.batching is not None and self._load is not None
        before, self.batching = self.batching, self.batching.halved()
        self.say(self.batching.describe_halving(before, step + 1))
        if self.exactness is not None:
            self.exactness.cut_tiles(self.batching.tiles or 1, step + 1)
        del self.loader
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.loader = self._load(step)

    def continue_with(self, facts: dict[str, Any]) -> None:
        """Check that these are those that the run began with, if it has any."""
        for name, value in facts.items():
            if (before := self.facts.get(name, value)) != value:
                raise ValueError(
                    f"this run began with {name} {before}, not {value}: the order of samples would change; go on with "
                    f"{before}, or give the Run another folder"
                )
        self.facts |= facts

    def _watch(self, samples: Samples | None, size: int) -> None:
        """Compare the data set over the ranks, and begin or continue its ledger; an iterable one has no size."""
        if self.data_watch.splits:
            return
        self.ledger = Ledger(size)
        if self._resumed_ledger:
            self.ledger.load_state_dict(self._resumed_ledger)
        self.data_watch = DataWatch(self.world, {"train": samples}, self.seed)
        for note in self.data_watch.compare_splits():
            self.say(note)

    def take(self, micro_batches: Iterable[MicroBatch], step: int) -> Iterator[MicroBatch]:
        """Yield those micro-batches of a step that have samples, each with its randomness."""
        self._in_hand = []
        for micro in micro_batches:
            self.micro = micro
            self._in_hand.append(micro.samples)
            if len(micro.indices):  # there may be more micro-batches than samples on this rank; the last has some
                # For dropout alone, all else is keyed: by step and micro-batch, so that it is the same when resumed.
                self.world.seed_generators((self.seed * 1_000_003 + step) * 65_537 + micro.number)
                yield micro

    @property
    def rng(self) -> Rng:
        if self.micro is None:
            raise ValueError("run.rng has the randomness of the samples in hand: use it inside the loop over batches")
        return Rng.of(self.seed, self.micro.epochs, self.micro.indices)

    def count_step(self) -> None:
        """Count the samples in hand as used."""
        self.used += self._in_hand
        self._in_hand = []
        if self.micro is not None and self.micro.next_item is not None:
            self.facts["next_item"] = list(self.micro.next_item)

    def state_dict(self) -> dict[str, Any]:
        return {"facts": self.facts, "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own, self.facts = self.facts, dict(state["facts"])
        self.continue_with(own)
        self._resumed_ledger = state["ledger"]


class Step(Iterator[Any]):
    """One step of a loop: an iterator over this rank's micro-batches. `run.accumulate` may go through them again."""

    def __init__(self, feed: Feed, number: int):
        self.feed, self.number = feed, number
        self._kept: list[MicroBatch] | None = None
        self._begun = False
        self._batches = self._once()

    def __next__(self) -> Any:
        self._begun = True
        return next(self._batches)

    @property
    def untouched(self) -> bool:
        """Whether none of its micro-batches was taken."""
        return not self._begun and self._kept is None

    def _once(self) -> Iterator[Any]:
        for micro in self.feed.take(self._kept or self.feed.loader.step(), self.number):
            yield micro.batch

    def again(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches from the first, however often it is called: they are kept for that."""
        if self._kept is None:
            if self._begun:
                raise ValueError("run.accumulate(step, loss) takes all of a step: leave out the loop over its batches")
            self._kept = list(self.feed.loader.step())
        yield from self.feed.take(self._kept, self.number)

    def halve(self) -> None:
        """Cut the step, and those after it, into micro-batches of half the size."""
        self._kept = None
        self.feed.halve(self.number)
