"""The data of a loop of one's own: this rank's micro-batches, the position in the data set, and the samples used."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .batching import Batching, MicroBatch, Position
from .config import Data
from .distributed import World
from .evaluate import samples_of
from .loader import Fetch, Loader, Preparation, Reader, is_iterable, requests, size_of
from .rng import Rng, seed_generators
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
        self.micro: MicroBatch | None = None
        """The micro-batch in hand."""
        self.ledger, self.data_watch = Ledger(0), DataWatch(world, {}, seed)
        self.used: list[Slice] = []
        """Samples of steps that were done since the last check."""
        self._in_hand: list[Slice] = []
        self._resumed_ledger: dict[str, Any] = {}

    def open(
        self, dataset: Any, length: Data, preparation: Preparation, workers: int | None, step: int
    ) -> tuple[Loader, Batching]:
        """Return what loads micro-batches from `step` on, and how they are cut."""
        iterable = is_iterable(dataset)
        if (length.n_steps is None) == (length.epochs is None):
            raise ValueError("say how long to train: n_steps or epochs, one of the two")
        global_batch = length.global_batch_size or length.batch_size
        if (size := size_of(dataset)) is None and length.n_steps is None:
            raise ValueError("an iterable data set has no known length: say how long to train by n_steps")
        batching = self.batching = Batching.plan(length, size, self.world.size)
        self.continue_with({"global_batch": global_batch, "dataset": size})
        self._watch(samples_of(dataset), size or 0)
        if iterable:
            first = Position(*self.facts.get("next_item", ()))
            reader = Reader(dataset, preparation, batching, self.world.rank, first, digest)
            return Loader(reader, self.world, workers), batching
        assert size is not None
        wanted = requests(Stream(size, global_batch, self.seed), self.world, batching, step)
        return Loader(Fetch(dataset, preparation), self.world, workers, requests=wanted), batching

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

    def micro_batches(self, loader: Loader, step: int) -> Iterator[Any]:
        """Yield the batch of each of this rank's micro-batches of a step."""
        self._in_hand = []
        for micro in loader.step():
            self.micro = micro
            self._in_hand.append(micro.samples)
            if len(micro.indices):  # there may be more micro-batches than samples on this rank; the last has some
                # For dropout alone, all else is keyed: by step and micro-batch, so that it is the same when resumed.
                seed_generators((self.seed * 1_000_003 + step) * 65_537 + micro.number, self.world.device)
                yield micro.batch

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
