"""Images and label maps as files: read with errors that say what is wrong, written whole or not at all."""

import functools
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .model import IGNORE

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@functools.cache
def palette() -> list[int]:
    """Pascal VOC's colours, 256 times red, green, blue: the bits of a label, spread over the highest bits of each."""
    colours = []
    for label in range(256):
        rgb = [0, 0, 0]
        for place in range(8):
            for channel in range(3):
                rgb[channel] |= (label >> (3 * place + channel) & 1) << (7 - place)
        colours += rgb
    return colours


def read_image(file: Path) -> Tensor:
    """(3, H, W) uint8, with the pixels as they are in the file: labels have no note of how to turn them."""
    return torch.from_numpy(np.array(_open(file, "image", "RGB"))).permute(2, 0, 1).contiguous()


def read_map(file: Path, classes: int | None = None) -> Tensor:
    """(H, W) uint8 from an 8-bit file, grey or with a palette. With `classes`, labels are checked against it."""
    image = _open(file, "label map", None)
    if image.mode not in ("L", "P"):
        raise ValueError(f"a label map has 8 bits a pixel, grey or palette, {file} has mode {image.mode}; convert it")
    labels = torch.from_numpy(np.array(image))
    if classes is not None:
        strange = labels[(labels >= classes) & (labels != IGNORE)]
        if len(strange):
            raise ValueError(
                f"labels are below num_classes {classes}, or {IGNORE} for none; {file} holds {int(strange.max())};"
                " raise --num_classes or mend the file"
            )
    return labels


def _open(file: Path, what: str, mode: str | None) -> Image.Image:
    try:
        with Image.open(file) as opened:
            if mode is not None:
                return opened.convert(mode)
            opened.load()
            return opened
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error ...
        raise ValueError(f"the {what} {file} cannot be read ({error}); remove or replace it") from error


def write_image(image: Tensor, file: Path) -> None:
    """(3, H, W) uint8 as a file of the kind that its name says."""
    _save(Image.fromarray(image.permute(1, 2, 0).numpy()), file)


def write_map(values: Tensor, file: Path, coloured: bool = True) -> None:
    """(H, W) uint8 as an 8-bit PNG, in VOC's colours or in grey."""
    image = Image.fromarray(values.numpy())
    if coloured:
        image.putpalette(palette())
    _save(image, file)


def _save(image: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{os.getpid()}-{file.name}")
    image.save(beside, quality=95, subsampling=0)  # which only JPEG has
    beside.replace(file)
