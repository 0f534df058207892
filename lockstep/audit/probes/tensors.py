"""The tensors in what a script passes around, and numbers that tell samples apart."""

from collections.abc import Iterator
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
    total: Tensor | None = None
    for tensor in batch:
        unlike = total is not None and len(tensor) != len(total) if tensor.dim() else True
        if unlike or tensor.numel() == 0 or tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested:
            continue
        flat = tensor.detach().reshape(len(tensor), -1)
        flat = flat[:, :: max(1, flat.shape[1] // _LOOK)]
        bits = flat.to(torch.float64).contiguous().view(torch.int64)
        places = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 0x9E3779B97F4A7C1 | 1
        mixed = (bits ^ (bits >> 29)) * places
        row = (mixed ^ (mixed >> 32)).sum(1)
        total = row if total is None else total * 1000003 + row
    return [] if total is None else total.tolist()
