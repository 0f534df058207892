"""Replicas hold the same weights, to the bit: compared by a checksum of every tensor."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes. Not longer: a sum of 64-bit words misses two top bits, which are signs, that change together."""
_SMALL_ON_CPU, _SMALL_ON_GPU = 1 << 13, 1 << 20
"""Up to so many elements, tensors of one shape are copied together: calls for each of them would cost more."""
_TOGETHER = 1 << 24
"""Elements that are copied at a time."""
_CHUNK = 1 << 18
"""Words of a tensor that a processor takes at a time, so that what is made of them stays in its cache."""


@torch.no_grad()
def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return a sum of each tensor's bits, read as integers: one pass over the weights, one wait for the device."""
    alike: dict[Any, list[str]] = {}
    for name, t in tensors.items():
        small = t.numel() <= (_SMALL_ON_CPU if t.is_cpu else _SMALL_ON_GPU)
        alike.setdefault((t.shape, t.dtype, t.device) if small else name, []).append(name)
    groups = [names for group in alike.values() for names in _chunks(group, tensors[group[0]].numel())]
    sums = [_sums([tensors[name] for name in names]) for names in groups]
    found = torch.cat([s.to(sums[0].device) for s in sums]).tolist() if sums else []
    by_name = dict(zip((name for names in groups for name in names), found, strict=True))
    return {name: by_name[name] for name in tensors}


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    step = max(1, _TOGETHER // max(1, size))
    return (names[i : i + step] for i in range(0, len(names), step))


def _sums(group: list[Tensor]) -> Tensor:
    whole = group[0].contiguous().unsqueeze(0) if len(group) == 1 else torch.stack(group)
    rows, width = whole.flatten(1) if whole.dim() > 1 else whole.unsqueeze(1), whole.element_size()
    if not rows.is_cpu or not rows.numel() or rows.shape[1] * width % 8:
        return rows.view(_INTEGER[min(width, 4)]).sum(1, dtype=torch.int64)
    if rows.storage_offset() * width % 8:
        rows = rows.clone()
    return _sums_of_words(rows.view(torch.int64))


def _sums_of_words(rows: Tensor) -> Tensor:
    """Add eight bytes at a time, which on a CPU is several times as fast as widening four. The upper halves are added
    once more, far from overflowing, so that a change of two top bits is not missed."""
    return sum((c.sum(1) + 1_000_003 * (c >> 32).sum(1) for c in rows.split(_CHUNK, 1)), rows.new_zeros(len(rows)))


def differing(ranks: list[dict[str, int]]) -> tuple[str, int, int] | None:
    """Return the first tensor that is not equal on all ranks, how many there are, and the first rank that differs."""
    wrong = [name for name, value in ranks[0].items() if any(other[name] != value for other in ranks[1:])]
    if not wrong:
        return None
    name = wrong[0]
    return name, len(wrong), next(r for r, other in enumerate(ranks) if other[name] != ranks[0][name])
