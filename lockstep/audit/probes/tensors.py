"""The tensors in what a script passes around, and numbers that tell samples apart."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LOOK = 256
"""Numbers of a sample that tell it from others."""


def tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors(value)


@torch.no_grad()
def row_hashes(batch: list[Tensor]) -> list[int]:
    """A number for each sample of a batch that depends on its bits and their places."""
    columns: list[Tensor] = []
    for t in batch:
        unknown = t.is_nested or t.layout != torch.strided or t.is_complex()
        if unknown or t.dim() == 0 or t.numel() == 0:
            continue
        if columns and (len(t) != len(columns[0]) or t.device != columns[0].device):
            continue
        flat = t.detach().reshape(len(t), -1)
        columns.append(flat[:, :: max(1, flat.shape[1] // _LOOK)].to(torch.float64))
    if not columns:
        return []
    bits = torch.cat(columns, 1).view(torch.int64)
    mixed = (bits ^ (bits >> 29)) * _places(bits.shape[1], bits.device)
    return (mixed ^ (mixed >> 32)).sum(1).tolist()


@cache
def _places(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * 0x9E3779B97F4A7C1 | 1
