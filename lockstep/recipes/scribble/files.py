"""Images and label maps as files: read with errors that name the file, written under a temporary name and renamed."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..confusion import IGNORE
from ..pixels import pixels_of, read_grey, read_labels, read_rgb, save_image, to_picture, voc_palette


def read_image(file: Path) -> Tensor:
    """(3, H, W) uint8."""
    return pixels_of(read_rgb(file))


def read_map(file: Path, classes: int) -> Tensor:
    """(H, W) uint8: labels below `classes`, or IGNORE."""
    labels = torch.from_numpy(read_labels(file, "label map"))
    unknown = labels[(labels >= classes) & (labels != IGNORE)]
    if len(unknown):
        raise ValueError(
            f"labels are below num_classes {classes}, or {IGNORE} for none; {file} holds {int(unknown.max())};"
            " raise --num_classes or fix the file"
        )
    return labels


def read_distances(file: Path) -> Tensor:
    """(H, W) uint8: nearness, 255 where it is greatest."""
    return torch.from_numpy(read_grey(file, "distance map"))


def write_image(image: Tensor, file: Path) -> None:
    """Write (3, H, W) uint8 as JPEG."""
    save_image(to_picture(image), file, quality=95, subsampling=0)


def write_map(values: Tensor, file: Path, coloured: bool = True) -> None:
    """Write (H, W) uint8 as an 8-bit PNG, in VOC's colours or in grey."""
    image = Image.fromarray(values.numpy())
    if coloured:
        image.putpalette(voc_palette().tobytes())
    save_image(image, file)
