"""The tensors in what a script passes around, and numbers that tell samples apart."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...watch.ledger import GAMMA, mixed

_RUNS = 16
"""So many runs of so many neighbours tell a large sample from others. Not single numbers all over it: memory comes in
lines, and to read those of a new batch costs more than what is done with them."""
_RUNS_OF_EMPTY, _FEW = 256, 2
"""As many where of each fourth number fewer than this are unlike the first: bags of words, sparse fingerprints."""
FIRST = 32
"""Samples of a batch of which each tensor is known by itself."""
_NUMPY = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float32, torch.float64,
}  # fmt: skip


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


def readable(tensor: Tensor) -> bool:
    """Whether a tensor has numbers to look at: not if it is on the device meta, or torch.func transforms it."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def row_hashes(batch: list[Tensor]) -> list[int]:
    """A number for each sample of a batch."""
    return sample_hashes(batch)[0]


def sample_hashes(batch: list[Tensor]) -> tuple[list[int], list[list[int]]]:
    """A number for each sample of a batch that depends on its bits and their places; and for the first samples, by
    tensor, such a number for what of them is in it.

    By NumPy, in one thread: torch would wake all of its threads for this little, beside workers that are busy.
    """
    columns: list[np.ndarray] = []
    for t in batch:
        unknown = not readable(t) or t.is_complex()
        if unknown or t.dim() == 0 or t.numel() == 0 or (columns and len(t) != len(columns[0])):
            continue
        columns.append(_looked_at(t))
    if not columns:
        return [], []
    bits = np.concatenate(columns, 1).view(np.uint64)
    numbers = mixed(bits + np.arange(bits.shape[1], dtype=np.uint64) * GAMMA)
    begins = np.cumsum([0, *(column.shape[1] for column in columns[:-1])])
    return numbers.sum(1).tolist(), np.add.reduceat(numbers[:FIRST], begins, axis=1).T.tolist()


def _looked_at(tensor: Tensor) -> np.ndarray:
    """Numbers of each sample; more of them, added to the first, of one in which hardly anything is to be seen."""
    rows = tensor.detach().reshape(len(tensor), -1)
    numbers = _runs(rows, _RUNS)
    if rows.shape[1] > numbers.shape[1]:
        empty = np.flatnonzero((numbers[:, ::4] != numbers[:, :1]).sum(1) < _FEW)
        if len(empty):
            more = _runs(rows[torch.from_numpy(empty).to(rows.device)], _RUNS_OF_EMPTY).view(np.uint64)
            places = np.arange(more.shape[1], dtype=np.uint64) * GAMMA
            numbers.view(np.uint64)[empty, 0] = mixed(more + places).sum(1)
    return numbers


def _runs(rows: Tensor, runs: int) -> np.ndarray:
    step = rows.shape[1] // runs
    if step > runs:
        rows = rows[:, : runs * step].unflatten(1, (runs, step))[:, :, :runs]
    plain = rows if rows.dtype in _NUMPY else rows.float()
    return plain.cpu().resolve_neg().numpy().astype(np.float64).reshape(len(rows), -1)
