"""Which samples make global batch k, and which of them are this rank's.

The stream is the concatenation of epochs; epoch e is a pseudo-random permutation of the data set, keyed by (seed, e).
Batch k is positions [k·G, (k+1)·G) of the stream: it runs across epoch borders, nothing is dropped, nothing padded.
Where a run stands follows from its step alone, and any rank of any world can tell any batch without the others.

The permutation is a Feistel network on a rectangle a × b just larger than the data set, walked along its cycle in
the rare case that it lands outside the set. It takes no memory, whatever the size of the set. A set of a few samples
is put in order by a hash of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import Request
from .rng import mix_word

Indices = NDArray[np.int64]

_ROUNDS = 8
_TINY = 64
"""Up to here a table: on so few the network is uneven, and walks too often."""

Words = NDArray[Any]


def _order(words: list[int]) -> Indices:
    return np.argsort(np.array(words, np.uint64), kind="stable")


class Permutation:
    """A pseudo-random permutation of 0 … size-1."""

    def __init__(self, size: int, key: int):
        assert 0 < size <= 1 << 62
        self.size = size
        self._table = _order([mix_word(key, i) for i in range(size)]) if size <= _TINY else None
        left = math.isqrt(size - 1) + 1
        self._sides = left, -(-size // left)
        self._word = np.uint32 if left <= 1 << 16 else np.uint64
        self._keys = [mix_word(key, i) for i in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """Where each of `positions` goes."""
        if self._table is not None:
            return self._table[positions]
        out = self._pass(positions.astype(self._word))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            moved = self._pass(out[outside])
            out[outside] = moved
            outside = outside[moved >= self.size]
        return out.astype(np.int64)

    def _pass(self, x: Words) -> Words:
        """All rounds once, on the whole rectangle: one half moves by what the other one hashes to."""
        this, that = (self._word(side) for side in self._sides)
        moving, fixed = np.divmod(x, that)
        for key in self._keys:
            moving = moving + self._hash(fixed, key, this)
            moving = np.minimum(moving, moving - this)  # modulo: an unsigned difference below zero is a huge number
            moving, fixed, this, that = fixed, moving, that, this
        return moving * that + fixed

    def _hash(self, x: Words, key: int, below: Any) -> Words:
        """A keyed multiplicative hash of `x`, less than `below`; array arithmetic wraps around silently."""
        word, half = self._word, 4 * np.dtype(self._word).itemsize
        y = x ^ word(key >> 64 - 2 * half)
        y *= word(0x9E3779B1 if half == 16 else 0x9E3779B97F4A7C15)
        y ^= y >> word(half - 1)
        y *= word(0x85EBCA6B if half == 16 else 0xBF58476D1CE4E5B9)
        y ^= word(key & 0xFFFFFFFF)
        y *= word(0xC2B2AE35 if half == 16 else 0x94D049BB133111EB)
        y >>= word(half)
        y *= below
        y >>= word(half)
        return y


@dataclass(frozen=True)
class Slice:
    """Some samples of one global batch."""

    epoch: Indices
    index: Indices


class Stream:
    """The endless sequence of sample indices, cut into global batches."""

    def __init__(self, size: int, global_batch: int, seed: int, costs: Sequence[float] | None = None):
        self.size = size
        self.global_batch = global_batch
        self.seed = seed
        self.costs = None if costs is None else np.asarray(costs, dtype=np.float64)
        self._orders: dict[int, Permutation] = {}

    def positions(self, start: int, stop: int) -> Slice:
        """The samples at positions [start, stop) of the stream."""
        position = np.arange(start, stop, dtype=np.int64)
        epoch, place = np.divmod(position, self.size)
        index = np.empty_like(position)
        for e in range(start // self.size, -(-stop // self.size)):
            if e not in self._orders:
                self._orders = {e: Permutation(self.size, mix_word(self.seed, e))}
            here = slice(max(0, e * self.size - start), (e + 1) * self.size - start)
            index[here] = self._orders[e](place[here])
        return Slice(epoch, index)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Slice:
        """Rank's part of global batch `step`; the parts' sizes differ by at most one.

        With costs, the batch is dealt out by them, to and fro, so that no rank waits long for another; whose sample it
        is makes no difference to the sum of all.
        """
        start, size = step * self.global_batch, self.global_batch
        if self.costs is not None:
            whole = self.positions(start, start + size)
            order = np.argsort(-self.costs[whole.index], kind="stable")
            turn, place = np.divmod(np.arange(size), world)
            mine = order[np.where(turn % 2 == 0, place, world - 1 - place) == rank]
            return Slice(whole.epoch[mine], whole.index[mine])
        return self.positions(start + size * rank // world, start + size * (rank + 1) // world)

    def micro_batches(self, step: int, rank: int, world: int, accumulation: int) -> list[Slice]:
        """That part cut for accumulation. The last piece is never empty: it is the one that synchronises gradients."""
        part = self.batch(step, rank, world)
        cuts = [len(part.index) * i // accumulation for i in range(accumulation + 1)]
        return [Slice(part.epoch[a:b], part.index[a:b]) for a, b in pairwise(cuts)]


@dataclass(frozen=True)
class Sizes:
    """How a run's data are cut: micro-batch × accumulation × world = global batch."""

    dataset: int
    micro_batch: int
    accumulation: int
    world: int
    global_batch: int
    n_steps: int

    @classmethod
    def of(cls, request: Request, dataset: int, world: int, bound: int | None = None) -> "Sizes":
        """`bound`: the global batch of the run that is resumed; it holds on any world."""
        data = request.train.data
        fixed = data.global_batch_size or bound
        if bound and fixed != bound:
            raise ValueError(f"the run to resume has a global batch of {bound}; it cannot go on with {fixed}")
        global_batch = fixed or data.batch_size * world * max(1, data.gradient_accumulation_steps)
        if global_batch < world:
            raise ValueError(f"a global batch of {global_batch} does not go round {world} ranks; start fewer")
        if dataset < global_batch:
            raise ValueError(
                f"the training set has {dataset} samples, fewer than the global batch of {global_batch}; "
                "lower --batch_size or --global_batch_size"
            )
        share = -(-global_batch // world)
        accumulation = -(-share // data.batch_size)
        n_steps = data.n_steps
        if data.epochs is not None:
            n_steps = -(-data.epochs * dataset // global_batch)
        if n_steps is None:
            raise ValueError("say how long to train: --n_steps or --epochs")
        n_steps = min(n_steps, request.smoke or n_steps)
        return cls(dataset, -(-share // accumulation), accumulation, world, global_batch, n_steps)

    @property
    def steps_per_epoch(self) -> float:
        return self.dataset / self.global_batch

    def every(self, interval: str) -> int:
        """An interval of the settings in steps: `500`, or `2ep` for two epochs."""
        if interval.endswith("ep"):
            return max(1, round(float(interval[:-2]) * self.steps_per_epoch)) if float(interval[:-2]) else 0
        return int(interval)
