"""Scenes: drawn, or a folder laid out like Pascal VOC with scribbles.

    FOLDER/
      train.txt  val.txt  [test.txt]        one name per line (also read from ImageSets/Segmentation/)
      [classes.txt]                         names of the classes, background first; without it VOC's
      JPEGImages/NAME.jpg                   the images (or .png, .webp, .bmp)
      SegmentationClassAug/NAME.png         true labels: of val and test
      Scribbles/NAME.png                    scribble labels, 255 for none: of train, as are the next three
      PseudoLabels/NAME.png                 pseudo labels
      ScribbleDistance/NAME.png             nearness to a scribble, 8-bit grey: 255 on it, less with distance
      PseudoDistance/NAME.png               nearness to a pseudo-labelled object

Items are dicts of uint8 tensors: `image` (3, H, W) and (H, W) maps, `scribble`, `pseudo`, `near_scribble` and
`near_pseudo` of training scenes, `label` of others.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...files import printable, read_text
from ...recipe import Split
from ..confusion import IGNORE
from ..folders import data_folder
from ..pixels import ENDINGS, image_files
from .files import read_distances, read_image, read_map, write_image, write_map
from .scenes import NAMES, SIZES, Scenes

VOC_NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
IMAGES, LABELS = "JPEGImages", "SegmentationClassAug"
FOLDERS: dict[str, str] = {
    "scribble": "Scribbles",
    "pseudo": "PseudoLabels",
    "near_scribble": "ScribbleDistance",
    "near_pseudo": "PseudoDistance",
}
"""The folder of each map of a training scene."""
TRAINING = tuple(FOLDERS)
_SHOWN = 10
MEAN = (124, 116, 104)
"""ImageNet's mean colour, which pads images."""


class Source(Protocol):
    """Scenes of one split."""

    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, Tensor]: ...


class VocFolder:
    """The scenes in a split's list. All files have to exist at the start; they are read on access."""

    def __init__(self, root: Path, split: Split, classes: int, folders: Mapping[str, str] = FOLDERS):
        self.classes = classes
        self.source = f"Pascal-VOC folder {root}"
        self.names = _list(root, split)
        wanted = dict(folders) if split == "train" else {"label": LABELS}
        for name in (IMAGES, *wanted.values()):
            if not (root / name).is_dir():
                raise ValueError(f"{root} has no folder {name}, which {split} needs; see docs/recipes/scribble.md")
        self.maps = {key: root / folder for key, folder in wanted.items()}
        images = {file.stem: file for file in sorted((root / IMAGES).iterdir()) if file.suffix.lower() in ENDINGS}
        missing = [f"{IMAGES}/{name}.jpg" for name in self.names if name not in images]
        for folder in self.maps.values():
            existing = set(os.listdir(folder))  # noqa: PTH208
            missing += [f"{folder.name}/{name}.png" for name in self.names if f"{name}.png" not in existing]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(
                f"{root} lacks {len(missing)} files that {split} needs: {', '.join(missing[:_SHOWN])}{more};"
                f" add them, or remove the names from {split}.txt"
            )
        self.images = [images[name] for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"the set has the scenes 0 to {len(self) - 1}")
        item = {"image": read_image(self.images[i])}
        for key, folder in self.maps.items():
            file = folder / f"{self.names[i]}.png"
            item[key] = read_distances(file) if key.startswith("near_") else read_map(file, self.classes)
            if item[key].shape != item["image"].shape[1:]:
                have, want = ("×".join(map(str, tuple(x.shape[-2:])[::-1])) for x in (item[key], item["image"]))
                raise ValueError(f"a label map has its image's size {want}, {file} has {have}; resize it")
        return item


def _list(root: Path, split: Split) -> list[str]:
    """Return the names of a split; a line may also be a path, or an image's and a label's path, as in some lists."""
    file = list_file(data_folder(str(root)), split)
    if file is None:
        raise ValueError(f"{root} has no {split}.txt, the list of its {split} scenes; write one name per line")
    names = [Path(line.split()[0]).stem for line in read_text(file).splitlines() if line.strip()]
    if not names:
        raise ValueError(f"{file} is empty; write one name per line")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"{file} names {twice} more than once; remove the duplicates")
    return names


def list_file(root: Path, split: Split) -> Path | None:
    """Return the file with the names of a split, if there is one."""
    candidates = (root / f"{split}.txt", root / "ImageSets" / "Segmentation" / f"{split}.txt")
    return next((file for file in candidates if file.is_file()), None)


def class_names(data_path: str | None, classes: int) -> tuple[str, ...]:
    """Return one name per class."""
    names: Sequence[str] = NAMES if data_path is None else VOC_NAMES if classes == len(VOC_NAMES) else ()
    if data_path is not None and (file := Path(data_path).expanduser() / "classes.txt").is_file():
        names = [line.strip() for line in printable(read_text(file)).splitlines() if line.strip()]
    if len(names) > classes:
        raise ValueError(f"the data have {len(names)} classes, num_classes is {classes}; raise --num_classes")
    return (*names, *(f"class{k}" for k in range(len(names), classes)))


class TrainingScenes:
    """The scenes without their true labels."""

    def __init__(self, scenes: Source):
        self.scenes, self.source = scenes, scenes.source

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = self.scenes[i]
        return {key: item[key] for key in ("image", *TRAINING)}


class LabelledScenes:
    """Image, true labels and size (H, W); with `crop`, the centre crop of that side, padded where it is larger."""

    def __init__(self, scenes: Source, crop: int | None = None):
        self.scenes, self.source, self.crop = scenes, scenes.source, crop

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = self.scenes[i]
        image, label = item["image"], item["label"]
        if self.crop is not None:
            image, label = centre_crop(image, self.crop, MEAN), centre_crop(label[None], self.crop, (IGNORE,))[0]
        return {"image": image, "label": label, "size": torch.tensor(label.shape)}


def centre_crop(image: Tensor, side: int, fill: Sequence[int]) -> Tensor:
    """Return the middle (C, side, side) of an image (C, H, W); a smaller one is padded with `fill`."""
    out = torch.tensor(fill, dtype=image.dtype)[:, None, None].repeat(1, side, side)
    height, width = image.shape[1:]
    h, w = min(height, side), min(width, side)
    top, left, y, x = (height - h) // 2, (width - w) // 2, (side - h) // 2, (side - w) // 2
    out[:, y : y + h, x : x + w] = image[:, top : top + h, left : left + w]
    return out


def pad_together(items: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Pad items of different sizes at the right and the bottom to the largest; `size` is what they had."""
    height, width = (max(item["image"].shape[d] for item in items) for d in (1, 2))

    def pad(key: str, value: Tensor) -> Tensor:
        if key == "size":
            return value
        return F.pad(value, (0, width - value.shape[-1], 0, height - value.shape[-2]), value=IGNORE)

    return [{key: pad(key, value) for key, value in item.items()} for item in items]


class Inputs:
    """Image files to predict: one, or all in a folder and below, in sorted order."""

    def __init__(self, path: Path):
        self.root = path if path.is_dir() else path.parent
        self.files = [path] if path.is_file() else image_files(path)
        if not self.files:
            raise ValueError(f"{path} holds no images ({' '.join(ENDINGS)})")
        seen: dict[Path, Path] = {}
        for file in self.files:
            other = seen.setdefault(self.output(file), file)
            if other != file:
                raise ValueError(f"{other} and {file} would both give {self.output(file)}; rename one of them")

    def output(self, file: Path) -> Path:
        """Return the file for an input's labels, relative to the folder of predictions."""
        return file.relative_to(self.root).with_suffix(".png")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        image = read_image(self.files[i])
        return {"image": image, "size": torch.tensor(image.shape[1:])}


def write(folder: Path, side: int) -> str:
    """Write the embedded scenes in the layout above; return a line about them."""
    splits: tuple[Split, ...] = ("train", "val", "test")
    for split in splits:
        scenes = Scenes(split, side)
        for i in range(len(scenes)):
            item, name = scenes[i], scenes.name(i)
            write_image(item["image"], folder / IMAGES / f"{name}.jpg")
            write_map(item["label"], folder / LABELS / f"{name}.png")
            for key, maps in FOLDERS.items() if split == "train" else ():
                write_map(item[key], folder / maps / f"{name}.png", coloured=not key.startswith("near_"))
        # Last, so that a list names only files that exist.
        (folder / f"{split}.txt").write_text("".join(f"{scenes.name(i)}\n" for i in range(len(scenes))))
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in NAMES))
    counts = ", ".join(f"{SIZES[split]} {split}" for split in splits)
    return f"{folder}: {counts} scenes of {len(NAMES)} classes; train with --data_path {folder}"
