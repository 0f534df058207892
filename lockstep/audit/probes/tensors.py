"""The tensors in what a script passes around, and numbers that tell samples apart."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...watch.ledger import GAMMA, mixed
from ..trace import packed

Words = NDArray[np.uint64]
Array = NDArray[Any] | Tensor
_RUNS, _RUN = 8, 64
"""So many runs of so many bytes tell a large sample from others. Not single numbers all over it: memory comes in lines
of so many bytes, and to read those of a new batch costs more than what is done with them."""
_RUNS_OF_EMPTY, _RUN_OF_EMPTY, _FEW = 256, 1024, 4
"""As many where fewer words than this are unlike the first: bags of words, sparse fingerprints."""
FIRST, _MOST = 32, 1024
"""Samples of a batch of which each tensor is known by itself, and of which anything is known."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: NumPy knows these, and not all that torch has beside them."""


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


def sample_hashes(batch: list[Tensor]) -> tuple[str, list[str]]:
    """A number for each sample of a batch, that depends on its bits and their places; and for the first samples, by
    tensor, such a number for what of them is in it. All packed.

    By NumPy, in one thread: torch would wake all of its threads for this little, beside workers that are busy.
    """
    known = [t for t in batch if readable(t) and t.dim() and t.numel()]
    hashes = [_hashes(t) for t in known if len(t) == len(known[0])]
    if not hashes:
        return "", []
    whole = sum((np.uint64(2 * n + 1) * h for n, h in enumerate(hashes[1:], 1)), hashes[0])
    return packed(whole), [packed(h[:FIRST]) for h in hashes]


def _hashes(tensor: Tensor) -> Words:
    """A number for each sample. Of one in which hardly anything is to be seen more is looked at."""
    rows = _rows(tensor)
    words = _runs(rows, _RUNS, _RUN)
    found = _sums(words)
    if math.prod(rows.shape[1:]) * rows.itemsize > words.shape[1] * words.itemsize:
        unlike = (words != words[:, :1]).sum(1)
        if unlike.min() < _FEW:
            empty = np.flatnonzero(unlike < _FEW)
            index = empty if isinstance(rows, np.ndarray) else torch.from_numpy(empty).to(rows.device)
            found[empty] += _sums(_runs(rows[index], _RUNS_OF_EMPTY, _RUN_OF_EMPTY))
    return found


def _rows(tensor: Tensor) -> Array:
    """The first samples of a batch as rows of integers; as an array of NumPy, if they are not on a GPU."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.resolve_neg().view(_INTEGER[plain.element_size()])
    rows: Array = plain.numpy() if plain.is_cpu else plain
    return rows[:_MOST].reshape(min(len(rows), _MOST), -1)


def _runs(rows: Array, runs: int, size: int) -> Words:
    """So many runs of so many bytes of each row, or all of a row that is hardly longer, as words."""
    run = size // rows.itemsize
    step = rows.shape[1] // runs // run * run
    if step > run:
        rows = rows[:, : runs * step].reshape(len(rows), runs, step)[:, :, :run]
    found = np.ascontiguousarray(rows if isinstance(rows, np.ndarray) else rows.cpu()).reshape(len(rows), -1)
    rest = -found.shape[1] * found.itemsize % 8 // found.itemsize
    return (np.pad(found, ((0, 0), (0, rest))) if rest else found).view(np.uint64)


def _sums(words: Words) -> Words:
    """A number for each row of words. They are mixed one by one: signs that change together must be heard."""
    return mixed(words + _places(words.shape[1])).sum(1)


@lru_cache(maxsize=64)
def _places(count: int) -> Words:
    return np.arange(count, dtype=np.uint64) * GAMMA
