"""The tensors in what a script passes around, and numbers that tell samples apart."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOOK = 256
"""Numbers of a sample that tell it from others."""
_NUMPY = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}


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


def row_hashes(batch: list[Tensor]) -> list[int]:
    """A number for each sample of a batch that depends on its bits and their places.

    By NumPy, in one thread: torch would wake all of its threads for this little, beside workers that are busy.
    """
    columns: list[np.ndarray] = []
    for t in batch:
        unknown = t.is_nested or t.layout != torch.strided or t.is_complex()
        if unknown or t.dim() == 0 or t.numel() == 0 or (columns and len(t) != len(columns[0])):
            continue
        flat = t.detach().reshape(len(t), -1)
        looked = flat[:, :: max(1, flat.shape[1] // _LOOK)]
        plain = looked.float() if looked.dtype not in _NUMPY else looked
        columns.append(plain.cpu().resolve_neg().numpy().astype(np.float64))
    if not columns:
        return []
    bits = np.concatenate(columns, 1).view(np.int64)
    mixed = (bits ^ (bits >> 29)) * (np.arange(1, bits.shape[1] + 1) * 0x9E3779B97F4A7C1 | 1)
    return (mixed ^ (mixed >> 32)).sum(1).tolist()
