"""From sample indices to micro-batches on the device: DataLoader, pinned memory, copies on a side stream."""

import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .activity import START_UP
from .batching import Batching, MicroBatch, Position
from .distributed import World
from .recipe import Augments, Recipe
from .rng import Rng
from .stream import Slice, Stream


@dataclass(frozen=True)
class Preparation:
    """How items become a micro-batch: augmentation, with the randomness of `seed`, and collation."""

    seed: int
    collate: Callable[[list[Any]], Any] = default_collate
    augment: Callable[[Any, Rng], Any] | None = None
    """augment(item, rng), with the randomness of that item."""

    @classmethod
    def of(cls, recipe: Recipe, seed: int) -> "Preparation":
        return cls(seed, recipe.collate, recipe.augment if isinstance(recipe, Augments) else None)


class Fetch:
    """Runs in the loader's processes: samples of a map-style data set in, a collated micro-batch out."""

    def __init__(self, dataset: Any, preparation: Preparation):
        self.items, self.preparation = item_getter(dataset), preparation

    @classmethod
    def of(cls, recipe: Recipe, dataset: Any, seed: int) -> "Fetch":
        return cls(dataset, Preparation.of(recipe, seed))

    def __getitems__(self, request: tuple[Slice, int, bool]) -> list[MicroBatch]:
        """Return one micro-batch, or its error: an exception would lose its message on the way to the rank."""
        samples, number, last = request
        epoch, index = torch.from_numpy(samples.epoch), torch.from_numpy(samples.index)
        seed, augment = self.preparation.seed, self.preparation.augment
        try:
            items = self.items(index.tolist())
            if augment is not None:
                rngs = (Rng.of(seed, epoch[i : i + 1], index[i : i + 1]) for i in range(len(index)))
                items = [augment(item, rng) for item, rng in zip(items, rngs, strict=True)]
            collated = self.preparation.collate(items) if items else None
            return [MicroBatch(collated, epoch, index, samples, number, last)]
        except ValueError as error:
            return [MicroBatch(None, epoch, index, samples, number, last, str(error))]


class Reader(IterableDataset[MicroBatch]):
    """Reads an iterable data set, one epoch after the other, and yields this rank's micro-batches.

    Every rank reads the whole sequence and keeps its own items: global batch k is the items [k·G, (k+1)·G) on any
    world, nothing is lost or repeated, and batches run across the ends of epochs. A data set that has `set_epoch` is
    told the epoch before each pass.
    """

    def __init__(
        self,
        dataset: Any,
        preparation: Preparation,
        batching: Batching,
        rank: int,
        first: Position,
        digest: Callable[[Any], str],
        step: int = 0,
        repeats: Callable[[int], Sequence[int]] = lambda _: (),
    ):
        """`first`: where the global batch of `step` begins. `digest` hashes an item. `repeats`: as in `requests`."""
        self.dataset, self.batching, self.first, self.step, self.repeats = dataset, batching, first, step, repeats
        self.digest = digest
        self.size, self.own = size_of(dataset), batching.own(rank)
        self.fetch, self._in_hand = Fetch(self, preparation), list[Any]()

    def __iter__(self) -> Iterator[MicroBatch]:
        sequence, start, in_a_row = self._sequence(), self.first, self.batching.steps_per_batch
        for first_step in itertools.count(self.step - self.step % in_a_row, in_a_row):
            steps = [step for step in range(first_step, first_step + in_a_row) if step >= self.step]
            numbers = {step: [*self.repeats(step), *self.own] for step in steps}
            spans = {number: self.batching.span(number) for some in numbers.values() for number in some}
            kept: dict[int, tuple[int, int, Any]] = {}
            for place, found in enumerate(itertools.islice(sequence, self.batching.global_batch)):
                if any(place in span for span in spans.values()):
                    kept[place] = found
            end = Position(found[0], found[1] + 1, self.digest(found[2]))
            for step in steps:
                for number in numbers[step]:
                    micro = self._collated([kept[place] for place in spans[number]], number)
                    yield micro._replace(next_item=end if step == first_step + in_a_row - 1 else start)
            start = end

    def collated(self, places: range, number: int) -> MicroBatch:
        """Return the items at some places of the first global batch as a micro-batch."""
        return self._collated(list(itertools.islice(self._sequence(), places.start, places.stop)), number)

    def _collated(self, items: list[tuple[int, int, Any]], number: int) -> MicroBatch:
        places = np.array([item[:2] for item in items], dtype=np.int64).reshape(-1, 2)
        samples, self._in_hand = Slice(places[:, 0].copy(), places[:, 1].copy()), [item[2] for item in items]
        (micro,) = self.fetch.__getitems__((samples, number, number == self.own[-1]))
        return micro

    def __getitems__(self, _: list[int]) -> list[Any]:
        """Return the items just read, whose places `fetch` has been told."""
        return self._in_hand

    def _sequence(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (epoch, number in the epoch, item) without end, from the first item on."""
        first_epoch, first_index, _ = self.first
        for epoch in itertools.count(first_epoch):
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            count, skipped = 0, first_index if epoch == first_epoch else 0
            for count, item in enumerate(self.dataset, 1):
                if count > skipped:
                    yield epoch, count - 1, item
            if count < max(1, skipped) or count != (self.size or count):
                expected = f"the {skipped} that were used of it before" if count < skipped else "one"
                wrong = f"not the {self.size} of its len()" if self.size else f"fewer than {expected}"
                raise ValueError(
                    f"epoch {epoch} of the iterable data set has {count} item(s), {wrong}: it must yield the same "
                    "items whenever it is read, on every rank"
                )


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is read in order; a ValueError if it can be read only once."""
    if isinstance(dataset, Iterator):
        kind = type(dataset).__name__
        raise ValueError(f"a {kind} can be read only once: give a data set whose __iter__ begins anew each time")
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def size_of(dataset: Any) -> int | None:
    """Return the number of samples in an epoch; None for an iterable data set that does not know it."""
    try:
        return len(dataset)
    except TypeError:
        if is_iterable(dataset):
            return None
        raise ValueError("a data set with __getitem__ needs __len__ too: its samples are shuffled") from None


def item_getter(dataset: Any) -> Callable[[list[int]], list[Any]]:
    """Return what fetches items by their indices, in one call if the data set has `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        return lambda indices: list(dataset.__getitems__(indices))
    return lambda indices: [dataset[i] for i in indices]


def _own_process_group(_: int) -> None:
    """Keep signals to the process group (Ctrl-C, a launcher's) from workers: the rank still needs them."""
    os.setpgid(0, 0)


def _unchanged(micro_batch: Any) -> Any:
    return micro_batch


def requests(
    stream: Stream,
    world: World,
    batching: Batching,
    first_step: int,
    repeats: Callable[[int], Sequence[int]] = lambda _: (),
) -> Iterator[tuple[Slice, int, bool]]:
    """Return, without end, what to fetch for this rank's micro-batches: samples, number, whether it is the last.

    `repeats`: the other ranks' tiles that this rank gets too in a step; they come before its own.
    """
    own = batching.own(world.rank)
    steps = (
        zip(numbers, stream.tiles(step, numbers, batching.tiles), strict=True)
        if batching.tiles
        else zip(own, stream.micro_batches(step, world.rank, world.size, batching.accumulation), strict=True)
        for step in itertools.count(first_step)
        for numbers in [[*repeats(step), *own]]
    )
    return ((samples, n, n == own[-1]) for step in steps for n, samples in step)


class Loader:
    """This rank's micro-batches, step after step, without end."""

    def __init__(
        self,
        source: Fetch | Reader,
        world: World,
        workers: int | None,
        dtype: torch.dtype | None = None,
        requests: Iterator[tuple[Slice, int, bool]] | None = None,
    ):
        workers = default_workers(world.device) if workers is None else workers
        if isinstance(source, Reader):
            workers = min(workers, 1)  # several would each read the whole sequence
        self._batches: Iterator[MicroBatch] = iter(
            DataLoader(
                source,  # type: ignore[arg-type]
                batch_size=1 if requests else None,
                batch_sampler=requests,  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=operator.itemgetter(0) if requests else _unchanged,
                pin_memory=world.device.type == "cuda",
                prefetch_factor=4 if workers else None,
                worker_init_fn=_own_process_group,
                generator=torch.Generator(),  # else it would draw from the global one, which is dropout's
            )
        )
        self._move: Callable[[Any], Any] = lambda data: to_device(data, world.device, dtype)
        self._copy_stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._prefetched: MicroBatch | None = None
        self._activity = world.activity
        if isinstance(source, Reader):
            with world.activity.during(START_UP):  # a resumed run reads all that comes before, however long it takes
                self._prefetched = self._fetch()

    def step(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step."""
        last = False
        while not last:
            micro_batch, self._prefetched = self._prefetched or self._fetch(), None
            if self._copy_stream is not None:  # on a GPU the next one is being copied meanwhile
                torch.cuda.current_stream().wait_stream(self._copy_stream)
                _record(micro_batch, torch.cuda.current_stream())
                self._prefetched = self._fetch()
            last = micro_batch.last
            yield micro_batch

    def _fetch(self) -> MicroBatch:
        activity, started = self._activity, time.perf_counter()
        activity.loads_data = True
        micro_batch = next(self._batches)
        activity.loads_data = False
        activity.data_seconds += time.perf_counter() - started
        activity.marks += 1
        if micro_batch.error:
            raise ValueError(micro_batch.error)
        if self._copy_stream is None:
            return self._move(micro_batch)
        with torch.cuda.stream(self._copy_stream):
            return self._move(micro_batch)


def to_device(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return nested dicts, tuples and lists with every tensor on the device; floats in `dtype`."""
    if isinstance(data, Tensor):
        wanted = dtype if dtype is not None and data.is_floating_point() else None
        return data.to(device, wanted, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device, dtype) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, dtype) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, dtype) for value in data)
    return data


def _record(data: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that memory filled on the copy stream is used on this one."""
    if isinstance(data, Tensor):
        data.record_stream(stream)
    elif isinstance(data, dict):
        for value in data.values():
            _record(value, stream)
    elif isinstance(data, list | tuple):
        for value in data:
            _record(value, stream)


def default_workers(device: torch.device) -> int:
    """Return up to 8 workers beside a GPU, whose CPU cores are free to load; none on a CPU that trains."""
    if device.type == "cpu":
        return 0
    return max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))
