"""Images with labels or masks: drawn shapes, IDX files, class folders, CIFAR-10, image and mask folders.

    load(None, "train", side=32, masks=False)               # the embedded shapes
    load("/usr/share/datasets/fashion-mnist", "test", 28, False)
    load("data", "val", 32, masks=True)                     # data/val/images, data/val/masks

Data without a validation split get one from `val_fraction` of their training images, always the same ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ...recipe import Split
from ...rng import Rng
from .. import images
from ..folders import data_folder
from ..pixels import ENDINGS, image_files, opened, to_picture
from ..shapes import Shapes
from . import idx, masks

MAX_SIDE = 224
"""Largest default side of images."""
_SHAPES_SIDE = 32
_SPLIT_SEED = 20_240_601
_EMBEDDED: dict[Split, int] = {"train": 2_000, "val": 500, "test": 500}
"""Images that `lockstep data` writes."""


class Subset:
    """The images of a data set with these indices."""

    def __init__(self, dataset: Any, indices: Sequence[int]):
        self.dataset, self.indices = dataset, indices
        self.names, self.source = dataset.names, dataset.source

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        chosen = [self.indices[i] for i in indices]
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(chosen))
        return [self.dataset[i] for i in chosen]


def load(
    path: str | None, split: Split, side: int, with_masks: bool, val_fraction: float = 0.1, limit: int | None = None
) -> Any | None:
    """Return one split, at most `limit` random images of it; None where the data have no such split."""
    found = _whole(path, split, side, with_masks)
    lacks_val = split != "test" and (found if split == "val" else _whole(path, "val", side, with_masks)) is None
    if lacks_val and val_fraction:
        train: Any = found if split == "train" else _whole(path, "train", side, with_masks)
        found = Subset(train, held_out(len(train), val_fraction, split == "val"))
    if found is None or limit is None or limit >= len(found):
        return found
    # Not every k-th: where classes alternate, that might be one class only.
    return Subset(found, sorted(_shuffled(len(found), "limit")[:limit]))


def held_out(count: int, fraction: float, val: bool) -> list[int]:
    """Return the indices of the validation images (`val`) or of the others, in order; neither is empty."""
    order = _shuffled(count, "val")
    size = min(max(1, round(count * fraction)), count - 1)
    return sorted(order[:size] if val else order[size:])


def _shuffled(count: int, name: str) -> list[int]:
    """Return 0 … count-1 in a random order that is always the same."""
    index = torch.arange(count)
    draws = Rng.of(_SPLIT_SEED, torch.zeros_like(index), index).uniform(name, dtype=torch.float64)
    order: list[int] = draws.argsort(stable=True).tolist()
    return order


def _whole(path: str | None, split: Split, side: int, with_masks: bool) -> Any | None:
    if path is None:
        return masks.ShapeMasks(split, side) if with_masks else Shapes(split, side=side)
    folder = _folder(path)
    if with_masks:
        return masks.load(folder, split, side)
    if holds_idx(folder):
        return idx.load(folder, split, side)
    found = images.load(path, split, side)
    # CIFAR-10 has no validation images. Its test images must not select a model that is tested on them.
    return None if split == "val" and isinstance(found, images.CifarImages) else found


def _folder(path: str) -> Path:
    debian = "fashion-mnist" in path
    return data_folder(path, "apt-get install dataset-fashion-mnist" if debian else "correct --data_path")


def holds_idx(folder: Path) -> bool:
    return any(idx.file_of(folder, split, kind) for split in ("train", "test") for kind in ("images", "labels"))


def native_side(path: str | None) -> int:
    """Return the side of the data's first image, at most 224."""
    if path is None:
        return _SHAPES_SIDE
    folder = _folder(path)
    if holds_idx(folder):
        file = idx.file_of(folder, "train", "images") or idx.file_of(folder, "test", "images")
        return max(idx.read(file, 3).shape[1:]) if file else MAX_SIDE
    if any(folder.glob("**/data_batch_*.bin")):
        return _SHAPES_SIDE
    first = next(iter(image_files(folder)), None)
    if first is None:
        raise ValueError(f"{folder} holds no images ({' '.join(ENDINGS)}), IDX or CIFAR-10 files; correct it")
    with opened(first) as image:
        return min(*image.size, MAX_SIDE)


class Inputs:
    """Images to predict with their names, and their files, unless they are in one IDX file."""

    def __init__(self, items: Any, names: list[str], files: list[Path] | None):
        self.items, self.names, self.files = items, names, files

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": self.items[i]["image"]}


def inputs(path: Path, side: int, with_masks: bool) -> Inputs:
    """Return the images of a file, a folder or an IDX file, in sorted order."""
    if path.is_file() and idx.is_idx(path):
        items = idx.IdxImages(path, None, side)
        return Inputs(items, [f"{path.name}[{i}]" for i in range(len(items))], None)
    if path.is_file():
        files, names = [path], [path.name]
    else:
        root = path / "images" if with_masks and (path / "images").is_dir() else path
        files = image_files(root)
        names = [str(file.relative_to(root)) for file in files]
    if not files:
        raise ValueError(f"{path} holds no images ({' '.join(ENDINGS)}); give another file or folder")
    # As in training: classification crops to the middle square, segmentation resizes the whole image.
    made: Any = masks.WholeImages(files, side)
    if not with_masks:
        made = images.FolderImages([(file, 0) for file in files], (), side, str(path))
    return Inputs(made, names, files)


def write(folder: Path, side: int, with_masks: bool, limit: int | None) -> str:
    """Write the embedded shapes as files that `load` reads: class folders, or images and masks."""
    counts = {split: min(count, limit or count) for split, count in _EMBEDDED.items()}
    if not with_masks:
        return images.write_folder(folder, counts, side)
    for split, count in counts.items():
        _write_masks(folder / split, masks.ShapeMasks(split, side), count)
    (folder / masks.CLASSES).write_text("\n".join(masks.ShapeMasks.names) + "\n")
    made = ", ".join(f"{count} {split}" for split, count in counts.items())
    return f"{made} images and masks of {len(masks.ShapeMasks.names)} classes, {side} pixels per side, in {folder}"


def _write_masks(folder: Path, shapes: masks.ShapeMasks, count: int) -> None:
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for i, item in enumerate(shapes.__getitems__(range(count))):
        to_picture(item["image"]).save(folder / "images" / f"{i:05d}.png")
        Image.fromarray(item["mask"].numpy()).save(folder / "masks" / f"{i:05d}.png")
