"""The tensors in what a script passes around, and numbers that tell samples apart."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...hashing import GOLDEN_GAMMA, mix_array
from ..trace import packed

Words = NDArray[np.uint64]
Places = NDArray[np.int64]
_RUN, _RUNS = 64, (8, 256)
"""A large sample is known by so many runs of so many bytes; by more of them, and at last by all of it, if hardly any
run holds different words: black borders, bags of words. Not single numbers all over it: memory comes in lines of so
many bytes, and to read those of a new batch costs more than what is done with them."""
_FEW = 3
"""Runs with different words that are hardly any."""
_GOLDEN = 0.6180339887498949
_PIECE = 1 << 20
"""Bytes that are looked at together, where all of a sample is."""
FIRST, _MOST = 32, 1024
"""Samples of a batch of which each tensor is known by itself, and of which anything is known."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: NumPy knows these, and not all that torch has beside them."""


def tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, mappings and data classes."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors(value)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for part in fields(thing):
            yield from tensors(getattr(thing, part.name, None))
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
    """A number for each sample. Of whole numbers more is looked at: texts begin alike and end alike."""
    return _look(_rows(tensor), int(tensor.element_size() > 1 and not tensor.is_floating_point()))


def _look(rows: NDArray[Any], look: int, which: Places | None = None) -> Words:
    """Numbers for all of the rows or some, by this look at them, or by the next as well where it sees little."""
    if look == len(_RUNS):
        return _whole(rows, which)
    run, runs = _RUN // rows.itemsize, _RUNS[look]
    count = rows.shape[1] // run
    if count <= runs:
        return _sums(_words(rows, which))
    words = _words(rows[:, : count * run].reshape(len(rows), count, run), which, _spread(count, runs))
    found, parts = _sums(words), words.reshape(len(words), runs, -1)
    seen = (parts != parts[:, :, :1]).any(2).sum(1)
    if seen.min() < _FEW:
        little = np.flatnonzero(seen < _FEW)
        found[little] += _look(rows, look + 1, little if which is None else which[little])
    return found


def _rows(tensor: Tensor) -> NDArray[Any]:
    """The first samples of a batch as rows of integers. From a GPU all of them are copied: its kernels for less than
    that would have to be loaded first, which takes as long as a step."""
    plain = tensor.detach()[:_MOST].cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.resolve_neg().view(_INTEGER[plain.element_size()])
    return plain.numpy().reshape(len(plain), -1)


def _whole(rows: NDArray[Any], which: Places | None) -> Words:
    """A number for each of some rows, from all of it: from each word that is unlike the one before it."""
    which = np.arange(len(rows)) if which is None else which
    found = np.empty(len(which), np.uint64)
    step = max(1, _PIECE // (rows.shape[1] * rows.itemsize))
    for i in range(0, len(which), step):
        words = _words(rows, which[i : i + step])
        flat, begins = words.ravel(), np.arange(len(words)) * words.shape[1]
        new = np.ones(flat.shape, bool)
        np.not_equal(flat[1:], flat[:-1], out=new[1:])
        new[begins] = True
        places = np.flatnonzero(new)
        mixes = mix_array(flat[places] + (places % words.shape[1]).astype(np.uint64) * np.uint64(GOLDEN_GAMMA))
        found[i : i + step] = np.add.reduceat(mixes, np.searchsorted(places, begins))
    return found


def _words(rows: NDArray[Any], which: Places | None, blocks: Places | None = None) -> Words:
    """All rows or some, or such blocks of them, as words."""
    for axis, index in ((1, blocks), (0, which)):
        if index is not None:
            rows = rows.take(index, axis)
    found = np.ascontiguousarray(rows).reshape(len(rows), -1)
    rest = -found.shape[1] * found.itemsize % 8 // found.itemsize
    return (np.pad(found, ((0, 0), (0, rest))) if rest else found).view(np.uint64)


@lru_cache(maxsize=64)
def _spread(count: int, runs: int) -> Places:
    """Numbers of blocks all over a row, but not at even distances: rows of images have one, too."""
    n = np.arange(runs)
    return ((n + n * _GOLDEN % 1) * count / runs).astype(np.int64)


def _sums(words: Words) -> Words:
    """A number for each row of words. They are mixed one by one: signs that change together must be heard."""
    return mix_array(words + _places(words.shape[1])).sum(1)


@lru_cache(maxsize=64)
def _places(count: int) -> Words:
    return np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
