"""Images with masks, for segmentation: drawn shapes, or folders of images and masks of the same names.

    folder/[train/]images/a.jpg   folder/[train/]masks/a.png   folder/classes.txt (one name per line; optional)

A mask is an image of class numbers with up to 16 bits, grey or palette, 255 (of 16 bits also 65535) for no label; or of
0 and 255 alone, background and foreground. Image and mask are resized to a square without cropping. Items: `image`
(3, S, S) uint8, `mask` (S, S) uint8.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...files import printable, read_text
from ...recipe import Split
from ..confusion import IGNORE
from ..pixels import ENDINGS, pixels_of, read_labels, read_rgb
from ..shapes import Shapes

CLASSES = "classes.txt"


class ShapeMasks:
    """The embedded shapes, each with its mask: 0 is the background, 1 + k the shape k."""

    names: tuple[str, ...] = ("background", *Shapes.names)
    source = "embedded shapes with masks"

    def __init__(self, split: Split, side: int):
        self.shapes = Shapes(split, side=side)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [
            {"image": item["image"], "mask": (covered(item["image"]) * (item["label"] + 1)).to(torch.uint8)}
            for item in self.shapes.__getitems__(indices)
        ]


def covered(image: Tensor) -> Tensor:
    """(S, S) bool: which pixels of a drawn image its shape covers by at least half.

    Corners are background, and the pixel that differs most from them is all shape; edge pixels mix the two linearly.
    """
    pixels = image.float()
    difference = pixels - pixels[:, :1, :1]
    largest = difference.flatten(1)[:, difference.square().sum(0).argmax()]
    coverage = (difference * largest[:, None, None]).sum(0) / largest.square().sum()
    return coverage >= 0.5


class MaskedImages:
    """Image files with the files of their masks, read on access."""

    def __init__(
        self,
        files: Sequence[tuple[Path, Path]],
        names: tuple[str, ...],
        two_valued: bool,
        side: int,
        source: str,
    ):
        self.files, self.names, self.two_valued, self.side, self.source = files, names, two_valued, side, source

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"the set has the images 0 to {len(self) - 1}")
        image, mask = self.files[i]
        return {"image": read_image(image, self.side), "mask": self._mask(mask)}

    def _mask(self, file: Path) -> Tensor:
        values = read_mask(file)
        if self.two_valued:
            values = (values > 0).astype(np.uint8)
        unknown = values[(values >= len(self.names)) & (values != IGNORE)]
        if len(unknown):
            raise ValueError(
                f"the mask {file} holds the class {unknown.max()}, there are {len(self.names)} (and {IGNORE} for no "
                f"label); correct it, or name all classes in {CLASSES}"
            )
        size = (self.side, self.side)
        return torch.from_numpy(np.array(Image.fromarray(values).resize(size, Image.Resampling.NEAREST)))


class WholeImages:
    """Image files without masks, to predict; resized without cropping."""

    def __init__(self, files: Sequence[Path], side: int):
        self.files, self.side = files, side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": read_image(self.files[i], self.side)}


def read_image(file: Path, side: int) -> Tensor:
    """(3, side, side) uint8."""
    return pixels_of(read_rgb(file).resize((side, side), Image.Resampling.BILINEAR))


def read_mask(file: Path) -> np.ndarray:
    """(height, width) uint8."""
    return read_labels(file, "mask", bilevel=True)


def load(folder: Path, split: Split, side: int) -> MaskedImages | None:
    """Return one split of a folder; without split folders all images are train."""
    has_splits = (folder / "train").is_dir()
    root = folder / split if has_splits else folder
    if not has_splits and split != "train":
        return None
    if split != "train" and not root.is_dir():
        return None
    train = _pairs(folder / "train" if has_splits else folder)
    names, two_valued = _classes(folder, train)
    return MaskedImages(train if split == "train" else _pairs(root), names, two_valued, side, f"masks in {root}")


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    if not (folder / "images").is_dir() or not (folder / "masks").is_dir():
        raise ValueError(
            f"images with masks are read from {folder}/images and {folder}/masks, which do not exist; create them"
        )
    images = sorted(p for p in (folder / "images").iterdir() if p.suffix.lower() in ENDINGS and p.name[0] != ".")
    if not images:
        raise ValueError(f"{folder}/images holds no images ({' '.join(ENDINGS)}); fill it")
    masks = {p.stem: p for p in (folder / "masks").iterdir() if p.suffix.lower() in ENDINGS and p.name[0] != "."}
    missing = [p.name for p in images if p.stem not in masks]
    if missing:
        raise ValueError(
            f"{len(missing)} images in {folder}/images have no mask of the same name, such as {missing[0]}"
        )
    return [(image, masks[image.stem]) for image in images]


def _classes(folder: Path, pairs: list[tuple[Path, Path]]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the classes, and whether masks are of 0 and 255 alone."""
    if (folder / CLASSES).is_file():
        names = tuple(line.strip() for line in printable(read_text(folder / CLASSES)).splitlines() if line.strip())
        if not 2 <= len(names) <= IGNORE:
            raise ValueError(f"{folder / CLASSES} names 2 to {IGNORE} classes, one per line, not {len(names)}; fix it")
        return names, False
    values = _values(tuple(mask for _, mask in pairs))
    if values == {0, IGNORE}:
        return ("background", "foreground"), True
    highest = max(values - {IGNORE}, default=0)
    if highest == 0:
        raise ValueError(f"the masks under {folder} hold no class but 0; label some pixels")
    return tuple(f"class {k}" for k in range(highest + 1)), False


@lru_cache(maxsize=4)
def _values(masks: tuple[Path, ...]) -> frozenset[int]:
    """Return every value that occurs. Cached: each split needs it, and reading all masks takes a while."""
    return frozenset(value for mask in masks for value in np.unique(read_mask(mask)).tolist())
