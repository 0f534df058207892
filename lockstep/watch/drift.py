"""Replicas hold the same tensors, to the bit: each is compared by a checksum in which the position of a word counts.

A tensor's bytes are read as 32-bit words. Each block of words is multiplied by fixed pseudo-random 64-bit weights, one
for each position, and added up modulo 2^64; the sums of the blocks are mixed with the number of the block and added
up. Words that are swapped, rows that are reversed and the same bit flipped in two words all change the checksum; two
different tensors have the same one with a probability of about 2^-32. It is the same on CPU and GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hashing import GOLDEN_GAMMA, mix_array, odd_words

_BLOCK = 1 << 14
"""Words that share one sum."""
_SMALL_ON_CPU, _SMALL_ON_GPU = 1 << 13, 1 << 20
"""Up to so many elements, tensors of one shape are copied together: calls for each of them would cost more."""
_TOGETHER = 1 << 24
"""Elements that are copied at a time."""
_IN_CACHE = 1 << 18
"""Words that a CPU multiplies at a time. A GPU takes `_TOGETHER`: more calls cost more than the memory."""


def checksums(tensors: dict[str, Tensor], positions: bool = True) -> dict[str, int]:
    """Return a checksum of each tensor: one pass over its bytes, one wait for the device.

    Without `positions` words may change places within a block unnoticed, at half the cost.
    """
    return start_checksums(tensors, positions).read()


@dataclass(frozen=True)
class PendingChecksums:
    """Checksums that the device is computing."""

    names: list[str]
    groups: list[list[str]]
    """Names of tensors of one shape, which were copied together."""
    shapes: list[torch.Size]
    """Of each group's sums: tensors × blocks."""
    sums: Tensor | None
    """The sums of all blocks, flat."""

    def read(self) -> dict[str, int]:
        """Return the checksums by name; waits for the device."""
        if self.sums is None:
            return {}
        flat, found, start = self.sums.cpu().numpy().view(np.uint64), dict[str, int](), 0
        for names, shape in zip(self.groups, self.shapes, strict=True):
            blocks = flat[start : start + shape.numel()].reshape(shape)
            found |= dict(zip(names, _combine(blocks), strict=True))
            start += shape.numel()
        return {name: found[name] for name in self.names}


@torch.no_grad()
def start_checksums(tensors: dict[str, Tensor], positions: bool = True) -> PendingChecksums:
    """Return the checksums of tensors as they are now, without waiting for the device."""
    alike: dict[Any, list[str]] = {}
    for name, t in tensors.items():
        small = t.numel() <= (_SMALL_ON_CPU if t.is_cpu else _SMALL_ON_GPU)
        alike.setdefault((t.shape, t.dtype, t.device) if small else name, []).append(name)
    groups = [names for group in alike.values() for names in _chunks(group, tensors[group[0]].numel())]
    sums = [_block_sums(_words([tensors[name] for name in names]), positions) for names in groups]
    flat = torch.cat([s.flatten().to(sums[0].device) for s in sums]) if sums else None
    return PendingChecksums(list(tensors), groups, [s.shape for s in sums], flat)


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    step = max(1, _TOGETHER // max(1, size))
    return (names[i : i + step] for i in range(0, len(names), step))


def _words(group: list[Tensor]) -> Tensor:
    """Return tensors of one shape as rows of int32 words; of single bytes where their number is not divisible by 4."""
    stacked = group[0].contiguous().unsqueeze(0) if len(group) == 1 else torch.stack(group)
    rows = stacked.reshape(len(group), -1)
    if not rows.numel():
        return rows.new_zeros(rows.shape, dtype=torch.int32)
    if rows.shape[1] * rows.element_size() % 4:
        return rows.view(torch.uint8).to(torch.int32)
    if rows.storage_offset() * rows.element_size() % 4:
        rows = rows.clone()
    return rows.view(torch.int32)


def _block_sums(rows: Tensor, positions: bool) -> Tensor:
    """Return (rows, blocks) int64: the sums of the blocks of each row, the last of which may be shorter."""
    sums_of = _weighted_sums if positions else partial(torch.sum, dim=1, dtype=torch.int64)
    blocks = rows.shape[1] // _BLOCK
    head, tail = rows[:, : blocks * _BLOCK], rows[:, blocks * _BLOCK :]
    sums = [sums_of(head.reshape(-1, _BLOCK)).view(len(rows), blocks)] if blocks else []
    sums += [sums_of(tail)[:, None]] if tail.shape[1] or not blocks else []
    return torch.cat(sums, 1) if len(sums) > 1 else sums[0]


def _weighted_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, every word times the weight of its position."""
    width = max(1, rows.shape[1])
    if not rows.is_cpu:
        weights = _weights_on(rows.device)[: rows.shape[1]]
        return torch.cat([(some * weights).sum(1) for some in rows.split(max(1, _TOGETHER // width))])
    array, step = rows.numpy(), max(1, _IN_CACHE // width)  # NumPy widens several times as fast as torch
    some = (array[i : i + step] * _weights()[: rows.shape[1]] for i in range(0, len(array), step))
    return torch.from_numpy(np.concatenate([products.sum(1) for products in some]))


def _combine(blocks: NDArray[np.uint64]) -> list[int]:
    """Return one checksum for each row of block sums."""
    number = np.arange(1, blocks.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
    return mix_array(blocks ^ number).sum(1, dtype=np.uint64).tolist()


@cache
def _weights() -> NDArray[np.int64]:
    return odd_words(_BLOCK, GOLDEN_GAMMA)


@cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_weights()).to(device)


def differing(ranks: list[dict[str, int]]) -> tuple[str, int, int] | None:
    """Return the first tensor that is not equal on all ranks, how many there are, and the first rank that differs."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    wrong = [name for name in names if any(other.get(name) != ranks[0].get(name) for other in ranks[1:])]
    if not wrong:
        return None
    name = wrong[0]
    return name, len(wrong), next(r for r, other in enumerate(ranks) if other.get(name) != ranks[0].get(name))
