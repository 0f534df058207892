"""IDX files, the format of MNIST and Fashion-MNIST: a header of sizes, then bytes; often compressed with gzip.

folder/train-images-idx3-ubyte[.gz]   train-labels-idx1-ubyte[.gz]
folder/t10k-images-idx3-ubyte[.gz]    t10k-labels-idx1-ubyte[.gz]
"""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_BYTES = 8
"""The code of unsigned bytes in an IDX header."""
_PREFIXES = {"train": "train", "test": "t10k"}
FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def file_of(folder: Path, split: str, kind: str) -> Path | None:
    """Return the file of a split's `images` or `labels`, in either spelling, compressed or not."""
    rank = 3 if kind == "images" else 1
    for joint in ("-", "."):
        for packed in ("", ".gz"):
            file = folder / f"{_PREFIXES[split]}-{kind}{joint}idx{rank}-ubyte{packed}"
            if file.is_file():
                return file
    return None


def is_idx(path: Path) -> bool:
    """Return whether a file has the name of IDX images."""
    return path.name.removesuffix(".gz").endswith(("-images-idx3-ubyte", "-images.idx3-ubyte"))


def read(file: Path, dimensions: int) -> np.ndarray:
    """Return a uint8 array of that many dimensions."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            content = opened.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read ({error}); install or download it again") from None
    if content[:4] != bytes([0, 0, _BYTES, dimensions]):
        raise ValueError(
            f"an IDX file of {dimensions} dimension(s) begins with 0000{_BYTES:02x}{dimensions:02x}, {file} with "
            f"{content[:4].hex() or 'nothing'}; it is another file or a damaged one"
        )
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else (0,)
    if len(content) != start + math.prod(shape) or not math.prod(shape):
        raise ValueError(
            f"{file} should hold {' × '.join(map(str, shape))} bytes after its header, it has "
            f"{max(0, len(content) - start)}; install or download it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


class IdxImages:
    """Grey images of an IDX file, in memory, as RGB; without `labels`, images to predict."""

    def __init__(self, images: Path, labels: Path | None, side: int, classes: int | None = None):
        self.pixels = read(images, 3)
        self.labels = None if labels is None else read(labels, 1)
        self.side = side
        self.source = f"IDX files in {images.parent}"
        if self.labels is None:
            self.names: tuple[str, ...] = ()
            return
        if len(self.labels) != len(self.pixels):
            raise ValueError(
                f"{images} has {len(self.pixels)} images and {labels} {len(self.labels)} labels; give files of one set"
            )
        found = int(self.labels.max()) + 1
        if classes is not None and found > classes:
            raise ValueError(
                f"{labels} holds the label {found - 1}, training has {classes} classes; give files of one set"
            )
        count = classes or found
        fashion = "fashion" in str(images.resolve()).lower() and count == len(FASHION)
        self.names = FASHION if fashion else tuple(map(str, range(count)))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        if len(indices) and not 0 <= min(indices) <= max(indices) < len(self):
            raise IndexError(f"the set has the images 0 to {len(self) - 1}")
        images = [torch.from_numpy(self._sized(i)).expand(3, -1, -1) for i in indices]
        if self.labels is None:
            return [{"image": image} for image in images]
        labels = torch.from_numpy(self.labels[list(indices)].astype(np.int64)).unbind()
        return [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]

    def _sized(self, i: int) -> np.ndarray:
        pixels = self.pixels[i]
        if pixels.shape == (self.side, self.side):
            return np.array(pixels)
        return np.array(Image.fromarray(pixels).resize((self.side, self.side), Image.Resampling.LANCZOS))


def load(folder: Path, split: str, side: int) -> IdxImages | None:
    """Return one split; IDX files have no val."""
    if split == "val":
        return None
    images, labels = file_of(folder, split, "images"), file_of(folder, split, "labels")
    if images is None and labels is None and split == "test":
        return None
    if images is None or labels is None:
        lacks = f"{_PREFIXES[split]}-{'images-idx3' if images is None else 'labels-idx1'}-ubyte[.gz]"
        raise ValueError(f"IDX data in {folder} lack {lacks}; add it")
    if split == "train":
        return IdxImages(images, labels, side)
    train = file_of(folder, "train", "labels")
    if train is None:
        raise ValueError(f"IDX data in {folder} lack train-labels-idx1-ubyte[.gz]; add it")
    return IdxImages(images, labels, side, int(read(train, 1).max()) + 1)
