"""Each sample exactly once an epoch: proven with one checksum an epoch, whatever the size of the set.

Every sample has a 64-bit hash. What all ranks together used in an epoch must add up to the sum over the whole set,
and be as many; a sample lost, repeated or taken by two ranks changes the sum.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hashing import GOLDEN_GAMMA, mix_array
from ..stream import Slice

_CHUNK = 1 << 20
_GAMMA = np.uint64(GOLDEN_GAMMA)


def _sum(index: NDArray[np.int64]) -> int:
    return int(mix_array(index.astype(np.uint64) + _GAMMA).sum(dtype=np.uint64))


Entry = tuple[int, int]
"""How many samples, and the sum of their hashes modulo 2^64."""


def tally(index: NDArray[np.int64]) -> Entry:
    """Return the entry for these samples."""
    return len(index), _sum(index)


def tally_epochs(used: list[Slice]) -> dict[int, Entry]:
    """Return the entries of samples from one or several epochs, by epoch."""
    if not used:
        return {}
    epoch = np.concatenate([samples.epoch for samples in used])
    index = np.concatenate([samples.index for samples in used])
    return {int(e): tally(index[epoch == e]) for e in np.unique(epoch)}


class Ledger:
    """On rank 0, what all ranks together have used of each epoch."""

    def __init__(self, size: int):
        self.size = size
        self.open_epochs: dict[int, Entry] = {}
        """Of each epoch that is not complete yet, the sums over all ranks."""
        self.complete = 0
        """Epochs that were proven complete."""

    def post(self, entries: list[dict[int, Entry]]) -> str | None:
        """Add what all ranks used; return what is wrong with it, if anything."""
        for by_epoch in entries:
            for epoch, (count, total) in by_epoch.items():
                before = self.open_epochs.get(epoch, (0, 0))
                self.open_epochs[epoch] = before[0] + count, (before[1] + total) % (1 << 64)
        for epoch, (count, total) in sorted(self.open_epochs.items()):
            if count < self.size:
                continue
            if count > self.size:
                return f"epoch {epoch} used {count} samples of {self.size}: some were used twice"
            if total != self._whole():
                return f"epoch {epoch} used {count} samples, but not each of the {self.size} once"
            del self.open_epochs[epoch]
            self.complete += 1
        return None

    def _whole(self) -> int:
        if not hasattr(self, "_expected"):
            pieces = (np.arange(a, min(a + _CHUNK, self.size)) for a in range(0, self.size, _CHUNK))
            self._expected = sum(_sum(piece) for piece in pieces) % (1 << 64)
        return self._expected

    def state_dict(self) -> dict[str, Any]:
        return {"complete": self.complete, "books": {str(e): list(entry) for e, entry in self.open_epochs.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.complete = state["complete"]
        self.open_epochs = {int(e): (count, total) for e, (count, total) in state["books"].items()}
