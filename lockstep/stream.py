"""Which samples make global batch k, and which of them are this rank's.

The stream is the concatenation of epochs; epoch e is a pseudo-random permutation of the data set, keyed by (seed, e).
Batch k is positions [k·G, (k+1)·G) of the stream: it runs across epoch borders, nothing is dropped, nothing padded.
The position in the stream follows from the step alone, and any rank can compute any batch without the others.

The permutation is a Feistel network on a rectangle a × b just larger than the data set; the rare result outside the
set is permuted again until it is inside (cycle walking). It takes constant memory for any size. A set of up to 64
samples is ordered by a hash of each.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hashing import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2, mix_words

Indices = NDArray[np.int64]

_ROUNDS = 8
_TINY = 64
"""Up to here a table: on so few samples the network is uneven and slow."""

Words = NDArray[Any]


def _order(words: list[int]) -> Indices:
    return np.argsort(np.array(words, np.uint64), kind="stable")


class Permutation:
    """A pseudo-random permutation of 0 … size-1."""

    def __init__(self, size: int, key: int):
        assert 0 < size <= 1 << 62
        self.size = size
        self._table = _order([mix_words(key, i) for i in range(size)]) if size <= _TINY else None
        left = math.isqrt(size - 1) + 1
        self._sides = left, -(-size // left)
        self._word = np.uint32 if left <= 1 << 16 else np.uint64
        self._keys = [mix_words(key, i) for i in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """Return the image of each of `positions`."""
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
        """Return all rounds once, on the whole rectangle: one side moves by a keyed hash of the other.

        The hash is multiplicative and less than the side; array arithmetic wraps around silently.
        """
        word, half = self._word, 4 * np.dtype(self._word).itemsize
        this, that = (word(side) for side in self._sides)
        moving, fixed = np.divmod(x, that)
        for key in self._keys:
            y = fixed ^ word(key >> 64 - 2 * half)
            y *= word(0x9E3779B1 if half == 16 else GOLDEN_GAMMA)
            y ^= y >> word(half - 1)
            y *= word(0x85EBCA6B if half == 16 else MULTIPLIER_1)
            y ^= word(key & 0xFFFFFFFF)
            y *= word(0xC2B2AE35 if half == 16 else MULTIPLIER_2)
            y >>= word(half)
            y *= this
            y >>= word(half)
            moving = moving + y
            moving = np.minimum(moving, moving - this)  # modulo: an unsigned difference below zero is a huge number
            moving, fixed, this, that = fixed, moving, that, this
        return moving * that + fixed


@dataclass(frozen=True)
class Slice:
    """Some samples of one global batch."""

    epoch: Indices
    index: Indices


class Stream:
    """The endless sequence of sample indices, cut into global batches."""

    def __init__(
        self,
        size: int,
        global_batch: int,
        seed: int,
        costs: Sequence[float] | None = None,
        steps_per_batch: int = 1,
    ):
        self.size, self.steps_per_batch = size, steps_per_batch
        self.global_batch = global_batch
        self.seed = seed
        self.costs = None if costs is None else np.asarray(costs, dtype=np.float64)
        self._orders: dict[int, Permutation] = {}

    def positions(self, start: int, stop: int) -> Slice:
        """Return the samples at positions [start, stop) of the stream."""
        position = np.arange(start, stop, dtype=np.int64)
        epoch, offset = np.divmod(position, self.size)
        index = np.empty_like(position)
        for e in range(start // self.size, -(-stop // self.size)):
            if e not in self._orders:
                self._orders = {e: Permutation(self.size, mix_words(self.seed, e))}
            in_epoch = slice(max(0, e * self.size - start), (e + 1) * self.size - start)
            index[in_epoch] = self._orders[e](offset[in_epoch])
        return Slice(epoch, index)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Slice:
        """Return the rank's slice of global batch `step`; the slices' sizes differ by at most one.

        With costs, samples are dealt out in the order of their cost, forwards and backwards in turn, so that all ranks
        take about as long. Which rank has a sample makes no difference to the sum over all.
        """
        start, size = step // self.steps_per_batch * self.global_batch, self.global_batch
        if self.costs is not None:
            whole = self.positions(start, start + size)
            order = np.argsort(-self.costs[whole.index], kind="stable")
            turn, seat = np.divmod(np.arange(size), world)
            mine = order[np.where(turn % 2 == 0, seat, world - 1 - seat) == rank]
            return Slice(whole.epoch[mine], whole.index[mine])
        return self.positions(start + size * rank // world, start + size * (rank + 1) // world)

    def tiles(self, step: int, numbers: Iterable[int], count: int) -> list[Slice]:
        """Return the samples of the tiles with these numbers, of `count` tiles that the global batch is cut into."""
        return [self.batch(step, tile, count) for tile in numbers]

    def micro_batches(self, step: int, rank: int, world: int, accumulation: int) -> list[Slice]:
        """Return that slice cut for accumulation. The last is never empty: with it gradients are synchronised."""
        own = self.batch(step, rank, world)
        cuts = [len(own.index) * i // accumulation for i in range(accumulation + 1)]
        return [Slice(own.epoch[a:b], own.index[a:b]) for a, b in pairwise(cuts)]
