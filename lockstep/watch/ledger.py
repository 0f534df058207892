"""Each sample exactly once an epoch: proven with one checksum an epoch, whatever the size of the set.

Every sample has a 64-bit hash. What all ranks together used in an epoch must add up to the sum over the whole set,
and be as many; a sample lost, repeated or taken by two ranks changes the sum.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..stream import Slice

_CHUNK = 1 << 20
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words from which those that went in cannot be told apart by eye: SplitMix64's last steps, one to one."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _sum(index: NDArray[np.int64]) -> int:
    return int(mixed(index.astype(np.uint64) + GAMMA).sum(dtype=np.uint64))


Entry = tuple[int, int]
"""How many samples, and the sum of their hashes modulo 2^64."""


def tally(index: NDArray[np.int64]) -> Entry:
    """The entry for these samples."""
    return len(index), _sum(index)


class Ledger:
    """What one rank used since it was last asked, and on rank 0 the books of all of them."""

    def __init__(self, size: int):
        self.size = size
        self.used: list[tuple[int, Slice]] = []
        """(step, samples) that the loop puts here; nothing else happens during a step."""
        self.books: dict[int, Entry] = {}
        self.complete = 0
        """Epochs that were proven whole."""

    def collect(self) -> dict[int, Entry]:
        """This rank's entries since the last call, by epoch."""
        used, self.used = self.used, []
        if not used:
            return {}
        epoch = np.concatenate([part.epoch for _, part in used])
        index = np.concatenate([part.index for _, part in used])
        return {int(e): tally(index[epoch == e]) for e in np.unique(epoch)}

    def post(self, entries: list[dict[int, Entry]]) -> str | None:
        """Enter what all ranks used; what is wrong with it, if anything."""
        for part in entries:
            for epoch, (count, total) in part.items():
                before = self.books.get(epoch, (0, 0))
                self.books[epoch] = before[0] + count, (before[1] + total) % (1 << 64)
        for epoch, (count, total) in sorted(self.books.items()):
            if count < self.size:
                continue
            if count > self.size:
                return f"epoch {epoch} used {count} samples of {self.size}: some were used twice"
            if total != self._whole():
                return f"epoch {epoch} used {count} samples, but not each of the {self.size} once"
            del self.books[epoch]
            self.complete += 1
        return None

    def _whole(self) -> int:
        if not hasattr(self, "_expected"):
            pieces = (np.arange(a, min(a + _CHUNK, self.size)) for a in range(0, self.size, _CHUNK))
            self._expected = sum(_sum(piece) for piece in pieces) % (1 << 64)
        return self._expected

    def state(self) -> dict[str, Any]:
        return {"complete": self.complete, "books": {str(e): list(entry) for e, entry in self.books.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.complete = state["complete"]
        self.books = {int(e): (count, total) for e, (count, total) in state["books"].items()}
