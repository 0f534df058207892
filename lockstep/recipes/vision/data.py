"""Where images come from: drawn shapes, IDX files, class folders, CIFAR-10, image and mask folders.

    load(None, "train", side=32, masks=False)               # the embedded shapes
    load("/usr/share/datasets/fashion-mnist", "test", 28, False)
    load("data", "val", 32, masks=True)                     # data/val/images, data/val/masks

Data without a validation split lose `val_fraction` of their training images to one, chosen by number, not by chance.
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
from ..pixels import ENDINGS, image_files, opened, to_picture
from ..shapes import Shapes
from . import idx, masks

LARGEST = 224
"""Side of the images of a folder, unless they are smaller or the user says."""
_SHAPES_SIDE = 32
_SPLIT_SEED = 20_240_601
_EMBEDDED: dict[Split, int] = {"train": 2_000, "val": 500, "test": 500}
"""Images that `lockstep data` writes."""


class Part:
    """Some of a set's images, by number."""

    def __init__(self, whole: Any, chosen: Sequence[int]):
        self.whole, self.chosen = whole, chosen
        self.names, self.source = whole.names, whole.source

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        chosen = [self.chosen[i] for i in indices]
        if hasattr(self.whole, "__getitems__"):
            return list(self.whole.__getitems__(chosen))
        return [self.whole[i] for i in chosen]


def load(
    path: str | None, split: Split, side: int, with_masks: bool, val_fraction: float = 0.1, limit: int | None = None
) -> Any | None:
    """One split, at most `limit` images of it, spread over the whole; None where the data have no such split."""
    found = _whole(path, split, side, with_masks)
    lacks_val = split != "test" and (found if split == "val" else _whole(path, "val", side, with_masks)) is None
    if lacks_val and val_fraction:
        train: Any = found if split == "train" else _whole(path, "train", side, with_masks)
        found = Part(train, held_out(len(train), val_fraction, split == "val"))
    if found is None or limit is None or limit >= len(found):
        return found
    # Not every k-th: where classes come in turn, that might be one of them alone.
    return Part(found, sorted(_shuffled(len(found), "limit")[:limit]))


def held_out(count: int, fraction: float, wanted: bool) -> list[int]:
    """The numbers that make up the validation part (`wanted`) or the rest, in order; never all or none of them."""
    order = _shuffled(count, "val")
    size = min(max(1, round(count * fraction)), count - 1)
    return sorted(order[:size] if wanted else order[size:])


def _shuffled(count: int, name: str) -> list[int]:
    """0 … count-1 in an order that is the same everywhere."""
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
    # CIFAR-10 has no validation images: what is chosen by the test images cannot be tested on them.
    return None if split == "val" and isinstance(found, images.CifarImages) else found


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        hint = "; apt-get install dataset-fashion-mnist brings it" if "fashion-mnist" in path else "; correct it"
        raise ValueError(f"data_path is a folder, {path} is {'a file' if folder.exists() else 'not there'}{hint}")
    return folder


def holds_idx(folder: Path) -> bool:
    return any(idx.file_of(folder, split, kind) for split in ("train", "test") for kind in ("images", "labels"))


def native_side(path: str | None) -> int:
    """The side of the data's own images: of the first one, and 224 at most."""
    if path is None:
        return _SHAPES_SIDE
    folder = _folder(path)
    if holds_idx(folder):
        file = idx.file_of(folder, "train", "images") or idx.file_of(folder, "test", "images")
        return max(idx.read(file, 3).shape[1:]) if file else LARGEST
    if any(folder.glob("**/data_batch_*.bin")):
        return _SHAPES_SIDE
    first = next(iter(image_files(folder)), None)
    if first is None:
        raise ValueError(f"{folder} holds no images ({' '.join(ENDINGS)}), IDX or CIFAR-10 files; correct it")
    with opened(first) as image:
        return min(*image.size, LARGEST)


class Inputs:
    """What a user wants predicted, with a name for each image; and its file, where it has one of its own."""

    def __init__(self, items: Any, names: list[str], files: list[Path] | None):
        self.items, self.names, self.files = items, names, files

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": self.items[i]["image"]}


def inputs(path: Path, side: int, with_masks: bool) -> Inputs:
    """A file or a folder of images, or a file of IDX images, in sorted order."""
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
        raise ValueError(f"there are no images ({' '.join(ENDINGS)}) in {path}; give another file or folder")
    # As in training: what is classified is the middle square, what gets a mask is the whole.
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
