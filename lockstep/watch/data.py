"""All ranks see the same data: the lengths of the splits, and hashes of a few samples, compared over the ranks.

Before step 1 the lengths are compared and a few samples of each split, for at most `START_SECONDS`. Later, when the
ranks are compared anyway, they hash one more sample, as long as all that takes less than `SHARE` of the run's time. A
sample is hashed as the data set returns it, before augmentation. Where it differs between ranks, each reads it again:
if it differs from itself, the data set is random by nature, which is a note and not an error.
"""

import dataclasses
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributed import World
from ..hashing import mix_words
from .agreement import OutOfLockstep, minority

SAMPLES = 4
"""Of each split, compared before step 1."""
START_SECONDS = 0.25
"""After which no more samples of a split are read before step 1; the first one always is."""
SHARE = 0.001
"""Of the time of a run, for the samples that are compared later."""
REREADS, REREAD_SECONDS = 32, 2.0
"""At most, to see whether a sample that differs between ranks is random."""
REMEDY = (
    "every rank needs the same samples in the same order: compare the files on all machines, sort what a folder "
    "lists, and draw nothing at random while the data set is made"
)
Place = tuple[str, int]
"""A split, and the index of a sample in it."""


@dataclass(frozen=True)
class Samples:
    """A split of the data, on this rank."""

    size: int
    items: Callable[[list[int]], list[Any]]


@dataclass(frozen=True)
class Reading:
    """A sample as this rank has read it."""

    digest: str
    error: str = ""
    """Why it could not be read."""


Report = tuple[dict[Place, Reading], set[str]]
"""What a rank has read, and the splits that were seen to be random."""


class DataWatch:
    """Compares the splits of all ranks."""

    def __init__(self, world: World, splits: Mapping[str, Samples | None], seed: int):
        self.world, self.splits, self.seed = world, splits, seed
        self.random: set[str] = set()
        """Splits whose samples are random by nature: they are not compared."""
        self._started, self._spent, self._cost = time.perf_counter(), 0.0, 0.0

    def compare_splits(self) -> list[str]:
        """Compare lengths and some samples; return notes, raise OutOfLockstep on all ranks if they differ."""
        if self.world.size == 1:
            return []
        sizes = self.world.gather({name: split and split.size for name, split in self.splits.items()})
        problem, places = self.world.broadcast((_different_sizes(sizes), self._some_places()))
        if problem:
            raise OutOfLockstep(problem)
        notes = self.compare(places)
        self._started, self._spent = time.perf_counter(), 0.0
        self._cost /= max(1, len(_first_of_splits(places)))  # more than a single sample takes: the first guess
        return notes

    def digests(self) -> dict[str, list[str]]:
        """Return, of each split, its size and the digests of a few samples on this rank, for the receipt."""
        with preserved_generators():
            read = self._read(self._some_places())
        sizes = {name: [f"{split.size} samples"] for name, split in self.splits.items() if split}
        return {name: [*size, *(r.digest for p, r in read.items() if p[0] == name)] for name, size in sizes.items()}

    def choose(self, step: int) -> list[Place]:
        """Return, on rank 0, the sample to compare now: none as long as that would take more than `SHARE`."""
        names = [name for name, split in self.splits.items() if split and split.size and name not in self.random]
        if self.world.size == 1 or not names:
            return []
        if self._spent + self._cost > SHARE * (time.perf_counter() - self._started):
            return []
        name = names[mix_words(self.seed, step) % len(names)]
        return self._places(name, 1, step)

    def compare(self, places: list[Place]) -> list[str]:
        """Compare these samples on all ranks; return notes, raise OutOfLockstep on all ranks if they differ."""
        started = time.perf_counter()
        with preserved_generators():
            read = self._read(places)
            unsteady = {place[0] for place in _first_of_splits(read) if self._differs_from_itself(place, read, 1)}
            ranks = self.world.gather((read, unsteady))
            found, suspects = self.world.broadcast(self._suspects(ranks) if self.world.is_main else None)
            unsteady = {place[0] for place in suspects if self._differs_from_itself(place, read, REREADS)}
            rereads = self.world.gather(unsteady) if suspects else []
        found, problem = self.world.broadcast((found.union(*rereads), self._problem(ranks, suspects, rereads)))
        notes = [_random_note(name) for name in sorted(found - self.random)]
        self.random |= found
        self._cost = time.perf_counter() - started
        self._spent += self._cost
        if problem:
            raise OutOfLockstep(problem)
        return notes

    def _some_places(self) -> list[Place]:
        return [place for name in self.splits for place in self._places(name, SAMPLES, 0)]

    def _places(self, name: str, count: int, step: int) -> list[Place]:
        """Return up to `count` samples of a split, chosen by (seed, step)."""
        split = self.splits[name]
        size = split.size if split else 0
        drawn = (mix_words(self.seed, step, number) % size for number in range(min(count, size)))
        return [(name, index) for index in dict.fromkeys(drawn)]

    def _read(self, places: list[Place]) -> dict[Place, Reading]:
        """Return these samples of each split, as many as there is time for."""
        read: dict[Place, Reading] = {}
        began: dict[str, float] = {}
        for place in places:
            now = time.perf_counter()
            if now - began.setdefault(place[0], now) < START_SECONDS:
                read[place] = self._reading(place)
        return read

    def _reading(self, place: Place) -> Reading:
        split = self.splits[place[0]]
        assert split is not None
        try:
            return Reading(digest(split.items([place[1]])[0]))
        except Exception as error:  # a data set's own; where all ranks have it, the loader reports it
            return Reading("", f"{type(error).__name__}: {error}")

    def _differs_from_itself(self, place: Place, read: dict[Place, Reading], times: int) -> bool:
        """Return whether the sample, read again up to so many times, is not what it was."""
        deadline = time.perf_counter() + REREAD_SECONDS
        again = (self._reading(place) for _ in range(times) if time.perf_counter() < deadline)
        return any(reading.digest != read[place].digest for reading in again)

    def _suspects(self, ranks: list[Report]) -> tuple[set[str], list[Place]]:
        """Return the splits that are random, and of each other split the first sample that differs between ranks."""
        unsteady = self.random.union(*(found for _, found in ranks))
        read = [readings for readings, _ in ranks]
        differing = [
            place
            for place in read[0]
            if place[0] not in unsteady
            and all(place in other for other in read)  # a slow rank has read fewer of them
            and any(other[place].digest != read[0][place].digest for other in read)
        ]
        return unsteady, _first_of_splits(differing)

    def _problem(self, ranks: list[Report], suspects: list[Place], rereads: list[set[str]]) -> str | None:
        unsteady = set[str]().union(*rereads)
        different = [place for place in suspects if place[0] not in unsteady]
        if not different or not ranks:
            return None
        name, index = different[0]
        readings = [read[different[0]] for read, _ in ranks]
        for rank, reading in enumerate(readings):
            if reading.error:
                why = f"cannot be read on rank {rank}, only on others ({reading.error})"
                return f"sample {index} of {name} {why}; {REMEDY}"
        return f"sample {index} of {name} {_who_differs([r.digest for r in readings])}; {REMEDY}"


def _first_of_splits(places: Mapping[Place, Any] | list[Place]) -> list[Place]:
    """Return the first of these samples of each split."""
    return list({name: (name, index) for name, index in reversed(list(places))}.values())[::-1]


def _different_sizes(ranks: list[dict[str, int | None]]) -> str | None:
    for name in ranks[0] if ranks else ():
        sizes = [rank[name] for rank in ranks]
        if len(set(sizes)) > 1:
            counted = [f"{size:,} samples" if size is not None else "no samples" for size in sizes]
            wrong = minority(sizes)
            if wrong:
                most = Counter(counted).most_common(1)[0][0]
                return f"{name} has {counted[wrong[0]]} on rank {wrong[0]} but {most} on most ranks; {REMEDY}"
            other = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
            return f"{name} has {counted[0]} on rank 0 but {counted[other]} on rank {other}; {REMEDY}"
    return None


def _who_differs(digests: list[str]) -> str:
    if wrong := minority(digests):
        return f"is not the same on rank {', '.join(map(str, wrong))} as on the others"
    other = next(rank for rank, value in enumerate(digests) if value != digests[0])
    return f"is not the same on rank 0 and rank {other}"


def _random_note(name: str) -> str:
    return (
        f"samples of {name} are random by nature: one that is read twice on one rank differs. So the ranks cannot be "
        "compared by their samples, and a run cannot be repeated; draw from the rng of augment() or loss() instead"
    )


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put back the state of the global generators, from which a data set may draw."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def digest(sample: Any) -> str:
    """Return a hash of all tensors, arrays, numbers and texts of a sample: nested dicts, sequences, dataclasses.

    Of an absolute path only the name counts, as folders differ between machines; other objects count by their type.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(sample):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Yield what a value consists of, as bytes."""
    if isinstance(value, Tensor):
        whole = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"dict {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        yield f"sequence {len(value)}".encode()
        for element in value:
            yield from _parts(element)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, str | Path):
        text = str(value)
        yield (Path(text).name if text.startswith("/") else text).encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | int | float | complex | None):
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):  # an array, a picture of Pillow
        yield f"{getattr(value, 'dtype', getattr(value, 'mode', ''))} {getattr(value, 'shape', '')}".encode()
        yield value.tobytes()
    else:
        yield type(value).__qualname__.encode()
