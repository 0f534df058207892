"""Generated images as files: a grid as PNG, and the trajectory from noise to image as GIF."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

_MAX_COLUMNS = 32
"""Of a grid; with more classes than that, they continue in the next row."""
_GAP = 2
_FRAME_MS, _HOLD_MS = 120, 2000
_GIF_ROWS, _GIF_COLOURS = 4, 128
"""Noise hardly compresses: the first rows of the grid show the trajectory as well, in a third of the bytes."""


def save(samples: Tensor, classes: int, path: Path) -> list[Path]:
    """Write samples (n, frames, 3, S, S) in [0, 1] as PATH.png and PATH.gif; return these paths, the grid first.

    Sample i has class i % classes, so the grid has one class per column.
    """
    columns = min(classes, _MAX_COLUMNS, len(samples))
    scale = max(1, round(64 / samples.shape[-1]))
    # Not with_suffix: a name such as step100-cfg2.5 has a dot of its own.
    png, gif = path.with_name(path.name + ".png"), path.with_name(path.name + ".gif")
    png.parent.mkdir(parents=True, exist_ok=True)
    grid(samples[:, -1], columns, scale).save(png)
    frames = samples[: _GIF_ROWS * columns].unbind(1)
    first, *rest = [grid(frame, columns, scale).quantize(_GIF_COLOURS) for frame in frames]
    durations = [_FRAME_MS] * len(rest) + [_HOLD_MS]
    first.save(gif, save_all=True, append_images=rest, duration=durations, loop=0)
    return [png, gif]


def grid(images: Tensor, columns: int, scale: int) -> Image.Image:
    """Return a picture of images (n, 3, S, S) in [0, 1], row by row on white, each pixel `scale` pixels wide."""
    side = images.shape[-1] * scale
    pixels = (images.detach().cpu() * 255 + 0.5).to(torch.uint8)
    pixels = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3).permute(0, 2, 3, 1)
    rows = -(-len(images) // columns)
    pitch = side + _GAP
    sheet = torch.full((rows * pitch + _GAP, columns * pitch + _GAP, 3), 255, dtype=torch.uint8)
    for i, picture in enumerate(pixels):
        top, left = i // columns * pitch + _GAP, i % columns * pitch + _GAP
        sheet[top : top + side, left : left + side] = picture
    return Image.fromarray(sheet.numpy())
