"""Images and label maps as files: read with errors that name the file, written under a temporary name and renamed."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..confusion import IGNORE
from ..pixels import opened, pixels_of, save_image, to_picture, voc_palette


def read_image(file: Path) -> Tensor:
    """(3, H, W) uint8, without EXIF rotation: label maps have none."""
    with opened(file) as image:
        return pixels_of(image.convert("RGB"))


def read_map(file: Path, classes: int | None = None) -> Tensor:
    """(H, W) uint8 from an 8-bit file, grey or with a palette. With `classes`, labels are checked against it."""
    with opened(file, "label map") as image:
        mode, labels = image.mode, torch.from_numpy(np.array(image))
    if mode not in ("L", "P"):
        raise ValueError(f"a label map has 8 bits per pixel, grey or palette, {file} has mode {mode}; convert it")
    if classes is not None:
        unknown = labels[(labels >= classes) & (labels != IGNORE)]
        if len(unknown):
            raise ValueError(
                f"labels are below num_classes {classes}, or {IGNORE} for none; {file} holds {int(unknown.max())};"
                " raise --num_classes or fix the file"
            )
    return labels


def write_image(image: Tensor, file: Path) -> None:
    """Write (3, H, W) uint8 as JPEG."""
    save_image(to_picture(image), file, quality=95, subsampling=0)


def write_map(values: Tensor, file: Path, coloured: bool = True) -> None:
    """Write (H, W) uint8 as an 8-bit PNG, in VOC's colours or in grey."""
    image = Image.fromarray(values.numpy())
    if coloured:
        image.putpalette(voc_palette().tobytes())
    save_image(image, file)
