"""Label maps in colour on top of their images, and examples of them side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .confusion import IGNORE
from .pixels import save_image, voc_palette

EXAMPLES = 8
"""Images that a test shows."""
_OPACITY = 0.5
_GAP = 4
_TITLE = 16
"""Pixels of the line above the columns."""
_SMALLEST, _LARGEST = 96, 256
"""Pixels of the longer side of an example, which is shown larger or smaller to that end."""
_COLUMNS = ("image", "truth", "prediction")


def palette() -> np.ndarray:
    """(256, 3) uint8: Pascal VOC's colours, but grey for pixels without a label."""
    colours = voc_palette()
    colours[IGNORE] = 160
    return colours


def overlay(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8: the image, tinted by class where it is not background."""
    tint = palette()[labels]
    mixed = (image * (1 - _OPACITY) + tint * _OPACITY).astype(np.uint8)
    return np.where((labels == 0)[..., None], image, mixed)


def write_examples(examples: Sequence[tuple[Tensor, Tensor, Tensor]], path: Path) -> Path:
    """Write image, true and predicted labels side by side under the titles of the columns, one example per row."""
    rows = []
    for image, truth, prediction in examples:
        pixels = image.permute(1, 2, 0).numpy()
        cells = (pixels, overlay(pixels, truth.numpy()), overlay(pixels, prediction.numpy()))
        rows.append([_resized(Image.fromarray(cell)) for cell in cells])
    width = max(row[0].width for row in rows) + _GAP
    picture = Image.new("RGB", (width * len(_COLUMNS), _TITLE + sum(row[0].height + _GAP for row in rows)), "white")
    draw = ImageDraw.Draw(picture)
    for k, title in enumerate(_COLUMNS):
        draw.text((k * width + 2, 2), title, fill="black")
    top = _TITLE
    for row in rows:
        for k, cell in enumerate(row):
            picture.paste(cell, (k * width, top))
        top += row[0].height + _GAP
    return save_image(picture, path)


def _resized(image: Image.Image) -> Image.Image:
    longest = max(image.size)
    factor = max(1, round(_SMALLEST / longest)) if longest <= _LARGEST else _LARGEST / longest
    how = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    return image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))), how)


def shares_of_classes(maps: Sequence[Tensor], names: Sequence[str]) -> str:
    """Return which part of all pixels each class has, the largest first: "background 71 %, circle 12 %"."""
    counts = torch.stack([torch.bincount(labels.flatten().long(), minlength=len(names)) for labels in maps]).sum(0)
    shares = (counts / counts.sum()).tolist()
    order = sorted(range(len(names)), key=lambda k: -shares[k])
    return ", ".join(f"{names[k]} {100 * shares[k]:.1f} %" for k in order if shares[k] > 0)
