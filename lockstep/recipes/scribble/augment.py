"""Augmentation of a training scene: scaled, rotated, mirrored, cropped and blurred, from its key.

The four geometric transforms are one map from pixels of the crop to positions in the scene, so everything is sampled
once: images and nearness bilinearly, labels from the nearest pixel. Outside the scene there is the mean colour, no
label and nearness 0.

Legend: S pixels per side of the crop, x to the right and y down from the middle.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rng import Rng
from ..confusion import IGNORE
from .data import MEAN

_RADIUS = 3
"""Of the blur, in pixels."""


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random transforms."""

    crop: int
    scale: tuple[float, float]
    rotate: float
    """Degrees, either way."""
    flip: bool
    blur: float
    """Probability."""
    sigma: tuple[float, float] = (0.1, 1.5)


def augment(item: dict[str, Tensor], rng: Rng, ranges: Augmentation) -> dict[str, Tensor]:
    """Transform one training item, all its maps in the same way; `rng` holds one key."""
    grid = _grid(rng, ranges, *item["image"].shape[1:])
    mean = torch.tensor(MEAN, dtype=torch.float32)[:, None, None]
    image = _sample(item["image"].float() - mean, grid, "bilinear") + mean
    labels = _sample(torch.stack([item["scribble"], item["pseudo"]]).float() - IGNORE, grid, "nearest") + IGNORE
    near = _sample(torch.stack([item["near_scribble"], item["near_pseudo"]]).float(), grid, "bilinear")
    maps = torch.cat([labels, near])
    names = ("scribble", "pseudo", "near_scribble", "near_pseudo")
    return {"image": _rounded(_blur(image, rng, ranges))} | dict(zip(names, _rounded(maps), strict=True))


def _rounded(values: Tensor) -> Tensor:
    return (values + 0.5).clamp(0, 255).to(torch.uint8)


def _grid(rng: Rng, ranges: Augmentation, height: int, width: int) -> Tensor:
    """(1, S, S, 2): the position in the scene of each pixel of the crop; −1 to 1 is from edge to edge."""
    low, high = ranges.scale
    draw = rng.uniform("geometry", 4, dtype=torch.float64)[0].tolist()
    scale, angle = low + (high - low) * draw[0], math.radians(ranges.rotate) * (2 * draw[1] - 1)
    mirror = -1.0 if ranges.flip and bool(rng.bernoulli("flip", 0.5)) else 1.0
    # The crop is anywhere in the scaled scene, or a smaller scene anywhere in the crop.
    slack_x, slack_y = (
        abs(scale * extent - ranges.crop) * (u - 0.5) for extent, u in zip((width, height), draw[2:], strict=True)
    )
    pixels = torch.arange(ranges.crop, dtype=torch.float32) + 0.5 - ranges.crop / 2
    x, y = (pixels[None, :] + slack_x) / scale, (pixels[:, None] + slack_y) / scale
    cosine, sine = math.cos(angle), math.sin(angle)
    across, down = mirror * (x * cosine + y * sine), y * cosine - x * sine
    return torch.stack([across * (2 / width), down * (2 / height)], dim=-1)[None]


def _sample(maps: Tensor, grid: Tensor, mode: str) -> Tensor:
    """(C, H, W) at the positions of the grid; 0 outside."""
    return F.grid_sample(maps[None], grid, mode=mode, padding_mode="zeros", align_corners=False)[0]


def _blur(image: Tensor, rng: Rng, ranges: Augmentation) -> Tensor:
    if not bool(rng.bernoulli("blur", ranges.blur)):
        return image
    low, high = ranges.sigma
    sigma = low + (high - low) * float(rng.uniform("sigma", dtype=torch.float64))
    kernel = torch.exp(-torch.arange(-_RADIUS, _RADIUS + 1, dtype=torch.float32).square() / (2 * sigma * sigma))
    kernel = kernel / kernel.sum()
    padded = F.pad(image[:, None], (_RADIUS,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))[:, 0]
