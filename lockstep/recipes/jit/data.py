"""Where the images come from: a folder with one sub-folder a class, or the embedded shapes; decoded once, if wanted.

Images are decoded when they are asked for, in the loader's processes. `cached` keeps what was decoded in a
memory-mapped file that all ranks and loaders share.
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

_WRITTEN: dict[Split, int] = {"train": 640, "val": 100}
"""Images of the embedded set that are written out: enough for eight ranks of 64."""


def load(path: str | None, split: Split, side: int, cache: str | None = None) -> Images | None:
    """The images of one split, `side` pixels high and wide; None where the data have no such split.

    `path` is the folder of training images (then `val` and `test` may lie beside it) or the one that holds `train`.
    """
    if path is not None and not Path(path).expanduser().exists():
        raise ValueError(f"data_path {path} is not there; correct it, or write one: lockstep data jit {_above(path)}")
    found = images.load(_whole(path), split, side)
    return cached(found, Path(cache).expanduser()) if cache and isinstance(found, FolderImages) else found


def _above(path: str) -> str:
    """What to give to `lockstep data` for `path` to be there."""
    return str(Path(path).parent) if Path(path).name == "train" else path


def _whole(path: str | None) -> str | None:
    """The folder of all splits, where `path` is that of the training images and others lie beside it."""
    if path is None:
        return None
    folder = Path(path).expanduser().resolve()
    beside = any((folder.parent / name).is_dir() for name in ("val", "test"))
    return str(folder.parent) if folder.name == "train" and beside and not (folder / "train").is_dir() else path


def write_shapes(folder: Path, side: int) -> str:
    """The embedded shapes as image files: folder/train/<class>/*.png, and the same under val."""
    return f"{images.write_folder(folder, _WRITTEN, side)}; use --data_path {folder}/train"


class CachedImages:
    """Decoded images in one file: a checksum for each, then the pixels of each. Who decodes an image first keeps it.

    Several processes may write the same image at once: they write the same bytes. A checksum that does not fit, be it
    that of an image that nobody has decoded yet, or of one half written by a process that died, means: decode it.
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
    """Never 0, which is what an entry nobody has written holds."""
    return zlib.crc32(pixels.data) | 1


def cached(source: FolderImages, folder: Path) -> CachedImages:
    """The same images by way of a file in `folder`, named after what is in it: files changed since make another."""
    digest = hashlib.sha256(str(source.side).encode())
    for path, _ in source.files:
        state = path.stat()
        digest.update(f"\n{path.absolute()} {state.st_size} {state.st_mtime_ns}".encode())
    file = folder / f"{source.side}px-{digest.hexdigest()[:24]}.cache"
    size = len(source) * (4 + 3 * source.side * source.side)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
        with file.open("r+b") as opened:
            opened.truncate(size)  # every rank does this: a file that has its size already stays as it is
            if hasattr(os, "posix_fallocate"):  # a full disk is found now; later it would be a bus error
                os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        raise ValueError(
            f"cache_images needs {size / 1e6:,.0f} MB in {folder}: {error.strerror}; choose another folder"
        ) from None
    return CachedImages(source, file)
