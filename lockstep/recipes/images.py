"""Labelled images: drawn, CIFAR-10's binary files, or a folder with one sub-folder per class.

    load(None, "train", side=32)                 # the embedded shapes
    load("data/cifar", "val", side=32)           # data_batch_1.bin ... test_batch.bin, or a folder that holds them
    load("data/flowers", "train", side=64)       # flowers/[train/]rose/*.jpg, flowers/[train/]tulip/*.jpg, ...

Items are dicts of `image`, (3, side, side) uint8, and `label`, an int64 scalar.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..files import printable
from ..recipe import Split
from .folders import data_folder, files_below, leads_up
from .pixels import ENDINGS, pixels_of, read_rgb, to_picture
from .shapes import Shapes

CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR_SIDE = 32
_CIFAR_RECORD = 1 + 3 * _CIFAR_SIDE * _CIFAR_SIDE
_CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR_TEST = "test_batch.bin"


class Images(Protocol):
    """A labelled image set: the names of its classes, and a few words about its source."""

    names: tuple[str, ...]
    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, Tensor]: ...


def load(path: str | None, split: Split, side: int) -> Images | None:
    """Return the images of one split, `side` pixels high and wide; None where the data have no such split."""
    if path is None:
        return Shapes(split, side=side)
    folder = data_folder(path)
    for candidate in (folder, folder / "cifar-10-batches-bin"):
        if any(candidate.glob("data_batch_*.bin")) or (candidate / _CIFAR_TEST).is_file():
            return _cifar(candidate, split, side)
    return _folder(folder, split, side)


def describe(images: Images) -> str:
    """Return a few words for the receipt."""
    return f"{images.source}, {len(images):,} images of {len(images.names)} classes"


def write_folder(folder: Path, sizes: dict[Split, int], side: int) -> str:
    """Write drawn shapes as an image folder, `sizes` of each split; return a line about it."""
    for split, size in sizes.items():
        shapes = Shapes(split, size, side)
        for name in shapes.names:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
        for i, item in enumerate(shapes.__getitems__(range(size))):
            to_picture(item["image"]).save(folder / split / shapes.names[int(item["label"])] / f"{i:05d}.png")
    counts = " and ".join(f"{size} {split}" for split, size in sizes.items())
    return f"{counts} images of {len(Shapes.names)} classes, {side} pixels per side, in {folder}"


class CifarImages:
    """CIFAR-10's binary files, memory-mapped: records of a label and 32×32 red, green and blue values."""

    names: tuple[str, ...] = CIFAR_NAMES

    def __init__(self, files: Sequence[Path]):
        self.source = f"CIFAR-10 binary in {files[0].parent}"
        self.parts = [_cifar_records(file) for file in files]
        self.starts = np.cumsum([0] + [len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"the set has the images 0 to {len(self) - 1}")
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        record = torch.from_numpy(np.array(self.parts[part][i - self.starts[part]]))
        return {"image": record[1:].view(3, _CIFAR_SIDE, _CIFAR_SIDE), "label": record[0].to(torch.int64)}


def _cifar(folder: Path, split: Split, side: int) -> CifarImages:
    if side != _CIFAR_SIDE:
        raise ValueError(f"CIFAR-10 images are {_CIFAR_SIDE} pixels per side, img_size is {side}; leave it out")
    files = [folder / name for name in (_CIFAR_TRAIN if split == "train" else (_CIFAR_TEST,))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"CIFAR-10 in {folder} lacks {', '.join(missing)}; unpack the binary version again")
    return CifarImages(files)


def _cifar_records(file: Path) -> np.ndarray:
    """(n, 3073) uint8."""
    size = file.stat().st_size
    if size == 0 or size % _CIFAR_RECORD:
        raise ValueError(
            f"a CIFAR-10 file is a multiple of {_CIFAR_RECORD} bytes, {file} has {size}; download it again"
        )
    records = np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, _CIFAR_RECORD)
    highest = int(records[:, 0].max())
    if highest >= len(CIFAR_NAMES):
        raise ValueError(f"CIFAR-10 labels are 0 to 9, {file} holds {highest}; it is another file or a damaged one")
    return records


class FolderImages:
    """Image files with their labels, read on access: the middle square, resized, in RGB."""

    def __init__(self, files: Sequence[tuple[Path, int]], names: tuple[str, ...], side: int, source: str):
        self.files = files
        self.names = names
        self.side = side
        self.source = source

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"the set has the images 0 to {len(self) - 1}")
        file, label = self.files[i]
        return {"image": _read(file, self.side), "label": torch.tensor(label)}


def _read(file: Path, side: int) -> Tensor:
    """(3, side, side) uint8: the middle square, resized."""
    image = read_rgb(file, least_side=2 * side)
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    image = image.crop((left, top, left + edge, top + edge)).resize((side, side), Image.Resampling.LANCZOS)
    return pixels_of(image)


def _folder(folder: Path, split: Split, side: int) -> FolderImages | None:
    splits = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    if not splits:
        if split != "train":
            return None
        names, files = _classes(folder)
        return FolderImages(files, names, side, f"image folder {folder}")
    if "train" not in splits:
        raise ValueError(f"{folder} has {' and '.join(splits)}, but no train; name the folder of training images train")
    if split not in splits:
        return None
    names, files = _classes(folder / "train")
    if split != "train":
        # Labels are numbered by the training classes, whichever of them this split has.
        own, files = _classes(folder / split)
        unknown = sorted(set(own) - set(names))
        if unknown:
            raise ValueError(
                f"{folder / split} has classes that train does not have: {', '.join(unknown)}; remove them"
            )
        files = [(file, names.index(own[label])) for file, label in files]
    return FolderImages(files, names, side, f"image folder {folder / split}")


def _classes(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Return the class names, sorted, and every image file with the number of its class."""
    visible = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    loose = [entry for entry in visible if entry.is_file() and entry.suffix.lower() in ENDINGS]
    if loose:
        raise ValueError(f"images are in one sub-folder per class, {loose[0]} is in none; move it into one")
    folders = [entry for entry in visible if entry.is_dir() and not leads_up(entry, folder)]
    if not folders:
        raise ValueError(f"{folder} holds no class folders; put images into {folder}/<class>/")
    found = files_below(folders, ENDINGS)
    for entry, own in found.items():
        if not own:
            why = ", or is a link to the images of another class" if entry.is_symlink() else ""
            raise ValueError(f"{entry} holds no images ({' '.join(ENDINGS)}){why}; fill it or remove it")
    files = [(file, label) for label, own in enumerate(found.values()) for file in own]
    return tuple(printable(entry.name) for entry in folders), files
