"""Images with masks, for segmentation: drawn shapes, or folders of images and masks of the same names.

    folder/[train/]images/a.jpg   folder/[train/]masks/a.png   folder/classes.txt (one name a line; may be missing)

A mask is an 8-bit picture of class numbers, 255 where there is no label; or 0 and 255 alone, the second being the
foreground. Image and mask are resized as a whole to a square. Items: `image` (3, S, S) uint8, `mask` (S, S) uint8.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...recipe import Split
from ..confusion import IGNORE
from ..pixels import ENDINGS, opened, pixels_of
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
    """(S, S) bool: where one shape of one colour covers at least half of a pixel of one background.

    Corners are background, and the pixel that differs most from them is all shape; others mix the two linearly.
    """
    pixels = image.float()
    away = pixels - pixels[:, :1, :1]
    farthest = away.flatten(1)[:, away.square().sum(0).argmax()]
    share = (away * farthest[:, None, None]).sum(0) / farthest.square().sum()
    return share >= 0.5


class MaskedImages:
    """Image files with the files of their masks, read when asked for."""

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
        strange = values[(values >= len(self.names)) & (values != IGNORE)]
        if len(strange):
            raise ValueError(
                f"the mask {file} holds the class {strange.max()}, there are {len(self.names)} (and {IGNORE} for no "
                f"label); correct it, or name all classes in {CLASSES}"
            )
        size = (self.side, self.side)
        return torch.from_numpy(np.array(Image.fromarray(values).resize(size, Image.Resampling.NEAREST)))


class WholeImages:
    """Image files without masks, to predict; resized as a whole."""

    def __init__(self, files: Sequence[Path], side: int):
        self.files, self.side = files, side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": read_image(self.files[i], self.side)}


def read_image(file: Path, side: int) -> Tensor:
    """(3, side, side) uint8."""
    with opened(file) as image:
        rgb = ImageOps.exif_transpose(image).convert("RGB")
        return pixels_of(rgb.resize((side, side), Image.Resampling.BILINEAR))


def read_mask(file: Path) -> np.ndarray:
    """(height, width) uint8."""
    with opened(file, "mask") as image:
        mode = image.mode
        mask = np.array(image.convert("L") if mode == "1" else image)
    if mode not in ("1", "L", "P"):
        raise ValueError(f"a mask has one byte per pixel, the class, {file} has mode {mode}; convert it")
    return mask


def load(folder: Path, split: Split, side: int) -> MaskedImages | None:
    """One split of a folder; without split folders all is train."""
    parted = (folder / "train").is_dir()
    place = folder / split if parted else folder
    if not parted and split != "train":
        return None
    if split != "train" and not place.is_dir():
        return None
    train = _pairs(folder / "train" if parted else folder)
    names, two_valued = _classes(folder, train)
    return MaskedImages(train if split == "train" else _pairs(place), names, two_valued, side, f"masks in {place}")


def _pairs(place: Path) -> list[tuple[Path, Path]]:
    if not (place / "images").is_dir() or not (place / "masks").is_dir():
        raise ValueError(f"images with masks lie in {place}/images and {place}/masks, which are not there; make them")
    images = sorted(p for p in (place / "images").iterdir() if p.suffix.lower() in ENDINGS and p.name[0] != ".")
    if not images:
        raise ValueError(f"{place}/images holds no images ({' '.join(ENDINGS)}); fill it")
    masks = {p.stem: p for p in (place / "masks").iterdir() if p.suffix.lower() in ENDINGS and p.name[0] != "."}
    missing = [p.name for p in images if p.stem not in masks]
    if missing:
        raise ValueError(f"{len(missing)} images in {place}/images have no mask of the same name, such as {missing[0]}")
    return [(image, masks[image.stem]) for image in images]


def _classes(folder: Path, pairs: list[tuple[Path, Path]]) -> tuple[tuple[str, ...], bool]:
    """The names of the classes, and whether masks are of 0 and 255 alone."""
    if (folder / CLASSES).is_file():
        names = tuple(line.strip() for line in (folder / CLASSES).read_text().splitlines() if line.strip())
        if not 2 <= len(names) <= IGNORE:
            raise ValueError(f"{folder / CLASSES} names 2 to {IGNORE} classes, one per line, not {len(names)}; fix it")
        return names, False
    values = _values(tuple(mask for _, mask in pairs))
    if values == {0, IGNORE}:
        return ("background", "foreground"), True
    highest = max(values - {IGNORE}, default=0)
    if highest == 0:
        raise ValueError(f"the masks under {folder} hold no class but 0; there is nothing to tell apart")
    return tuple(f"class {k}" for k in range(highest + 1)), False


@lru_cache(maxsize=4)
def _values(masks: tuple[Path, ...]) -> frozenset[int]:
    """Every value that occurs; train, val and test ask for it, reading all files takes a while."""
    return frozenset(value for mask in masks for value in np.unique(read_mask(mask)).tolist())
