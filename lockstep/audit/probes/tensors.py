"""The tensors in what a script passes around, and hashes that tell samples apart."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...hashing import GOLDEN_GAMMA, mix_array
from ..recorder import packed

Words = NDArray[np.uint64]
Positions = NDArray[np.int64]
_RUN, _RUNS, _RUNS_OF_INTEGERS = 64, 8, 256
"""Of a large sample only so many runs of so many bytes are read; all of a sample in which hardly any run holds
different words (black borders, bags of words). Runs and not single numbers: memory comes in lines of so many bytes, and
reading those of a new batch costs more than hashing them. Of integers more is read: texts begin alike and end alike."""
_FEW = 3
"""Runs with different words that are hardly any."""
_GOLDEN = 0.6180339887498949
_PIECE = 1 << 20
"""Bytes that are hashed together where all of a sample is read."""
FIRST, _MOST = 32, 1024
"""Samples of a batch whose tensors are hashed one by one, and samples that are hashed at all."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: NumPy has these, and not all that torch has beside them."""


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, mappings and data classes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors(getattr(value, part.name, None))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def readable(tensor: Tensor) -> bool:
    """Whether a tensor has numbers to read: not if it is on the meta device, or torch.func transforms it."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def sample_hashes(batch: list[Tensor]) -> tuple[str, list[str]]:
    """A hash of each sample of a batch, by its bits and their positions; and for the first samples, a hash of each
    tensor by itself. All packed.

    By NumPy, in one thread: torch would wake all of its threads for this little, beside workers that are busy.
    """
    known = [t for t in batch if readable(t) and t.dim() and t.numel()]
    hashes = [_hashes(t) for t in known if len(t) == len(known[0])]
    if not hashes:
        return "", []
    whole = sum((np.uint64(2 * n + 1) * h for n, h in enumerate(hashes[1:], 1)), hashes[0])
    return packed(whole), [packed(h[:FIRST]) for h in hashes]


def _hashes(tensor: Tensor) -> Words:
    """A hash of each sample: by some runs of it, and where these hold little by all of it."""
    rows = _rows(tensor)
    runs = _RUNS if tensor.element_size() == 1 or tensor.is_floating_point() else _RUNS_OF_INTEGERS
    run = _RUN // rows.itemsize
    count = rows.shape[1] // run
    if count <= runs:
        return _sums(_words(rows))
    words = _words(rows[:, : count * run].reshape(len(rows), count, run).take(_spread(count, runs), 1))
    found, parts = _sums(words), words.reshape(len(words), runs, -1)
    uniform = np.flatnonzero((parts != parts[:, :, :1]).any(2).sum(1) < _FEW)
    step = max(1, _PIECE // (rows.shape[1] * rows.itemsize))
    for chosen in (uniform[i : i + step] for i in range(0, len(uniform), step)):
        found[chosen] += _hash_whole(_words(rows[chosen]))
    return found


def _rows(tensor: Tensor) -> NDArray[Any]:
    """The first samples of a batch as rows of integers. From a GPU all of them are copied: its kernels for less than
    that would have to be loaded first, which takes as long as a step."""
    plain = tensor.detach()[:_MOST].cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.resolve_neg().view(_INTEGER[plain.element_size()])
    return plain.numpy().reshape(len(plain), -1)


def _hash_whole(words: Words) -> Words:
    """A hash of each row, by all of it: by each word that is unlike the one before it."""
    flat, begins = words.ravel(), np.arange(len(words)) * words.shape[1]
    new = np.ones(flat.shape, bool)
    np.not_equal(flat[1:], flat[:-1], out=new[1:])
    new[begins] = True
    positions = np.flatnonzero(new)
    mixes = mix_array(flat[positions] + (positions % words.shape[1]).astype(np.uint64) * np.uint64(GOLDEN_GAMMA))
    return np.add.reduceat(mixes, np.searchsorted(positions, begins))


def _words(rows: NDArray[Any]) -> Words:
    """The rows as words of 8 bytes."""
    found = np.ascontiguousarray(rows).reshape(len(rows), -1)
    rest = -found.shape[1] * found.itemsize % 8 // found.itemsize
    return (np.pad(found, ((0, 0), (0, rest))) if rest else found).view(np.uint64)


def _spread(count: int, runs: int) -> Positions:
    """Numbers of blocks all over a row, but not at even distances: rows of images have one, too."""
    n = np.arange(runs)
    return ((n + n * _GOLDEN % 1) * count / runs).astype(np.int64)


def _sums(words: Words) -> Words:
    """A hash of each row of words. They are mixed one by one, so that two signs that change together are detected."""
    return mix_array(words + np.arange(words.shape[1], dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)).sum(1)
