"""Labelled images of a folder with one sub-folder per class, or the embedded shapes; decoded once with a cache.

Images are decoded on access, in the loader's processes. `cached` stores decoded images in a memory-mapped file that all
ranks and loaders share.
"""

import hashlib
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...recipe import Split
from .. import images
from ..images import FolderImages, Images

_EMBEDDED: dict[Split, int] = {"train": 640, "val": 100}
"""Images of the embedded set that `lockstep data` writes: enough for eight ranks of 64."""
_DECODER = 2
"""Version of what is decoded from a file; raise it when that changes, so that older caches are not used."""


def load(path: str | None, split: Split, side: int, cache: str | None = None) -> Images | None:
    """Return the images of one split, `side` pixels high and wide; None where the data have no such split.

    `path` is the folder of training images (with `val` and `test` beside it) or the one that contains `train`.
    """
    if path is not None and not Path(path).expanduser().exists():
        raise ValueError(f"data_path {path} is missing; correct it, or write one: lockstep data jit {_data_root(path)}")
    found = images.load(_split_root(path), split, side)
    return cached(found, Path(cache).expanduser()) if cache and isinstance(found, FolderImages) else found


def _data_root(path: str) -> str:
    """Return the folder to give to `lockstep data` so that `path` exists afterwards."""
    return str(Path(path).parent) if Path(path).name == "train" else path


def _split_root(path: str | None) -> str | None:
    """Return the parent of `path` if that is `train` with other splits beside it, else `path`."""
    if path is None:
        return None
    folder = Path(path).expanduser().resolve()
    has_others = any((folder.parent / name).is_dir() for name in ("val", "test"))
    return str(folder.parent) if folder.name == "train" and has_others and not (folder / "train").is_dir() else path


def write_shapes(folder: Path, side: int) -> str:
    """Write the embedded shapes as folder/train/<class>/*.png, and the same under val."""
    return f"{images.write_folder(folder, _EMBEDDED, side)}; use --data_path {folder}/train"


class CachedImages:
    """Decoded images in one file: all checksums, then all pixels. The process that first decodes an image stores it.

    Several processes may write the same image at once: they write the same bytes. An image whose checksum does not
    match, because it was never decoded or was half written by a process that died, is decoded again.
    """

    def __init__(self, source: FolderImages, file: Path):
        self.decoded = source
        self.names = source.names
        self.source = f"{source.source} (decoded images in {file.parent})"
        self._shape = (len(source), 3, source.side, source.side)
        self._sums = np.memmap(file, np.uint32, "r+", shape=(len(source),))
        self._pixels: NDArray[np.uint8] = np.memmap(file, np.uint8, "r+", self._sums.nbytes, self._shape)

    def __len__(self) -> int:
        return len(self.decoded)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"the set has the images 0 to {len(self) - 1}")
        pixels = np.array(self._pixels[i])
        if _checksum(pixels) != self._sums[i]:
            pixels = self.decoded[i]["image"].numpy()
            self._pixels[i] = pixels
            self._sums[i] = _checksum(pixels)
        return {"image": torch.from_numpy(pixels), "label": torch.tensor(self.decoded.files[i][1])}


def _checksum(pixels: NDArray[np.uint8]) -> int:
    """Never 0, the checksum of an entry that was never written."""
    return zlib.crc32(pixels.data) | 1


def cached(source: FolderImages, folder: Path) -> CachedImages:
    """Return the same images with a cache in `folder`, named by a hash of the files' paths, sizes and times."""
    digest = hashlib.sha256(f"{_DECODER} {source.side}".encode())
    for path, _ in source.files:
        state = path.stat()
        digest.update(os.fsencode(f"\n{path.absolute()} {state.st_size} {state.st_mtime_ns}"))
    file = folder / f"{source.side}px-{digest.hexdigest()[:24]}.cache"
    size = len(source) * (4 + 3 * source.side * source.side)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
        with file.open("r+b") as opened:
            opened.truncate(size)  # on every rank: it does not change a file that has its size already
            if hasattr(os, "posix_fallocate"):  # a full disk fails here and not later with a bus error
                os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        raise ValueError(
            f"cache_images needs {size / 1e6:,.0f} MB in {folder}: {error.strerror}; choose another folder"
        ) from None
    return CachedImages(source, file)
