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
    height, width = item["image"].shape[1:]
    grid = _grid(rng, ranges, height, width)
    mean = torch.tensor(MEAN, dtype=torch.float32)[:, None, None]
    smooth = torch.empty(5, height, width, dtype=torch.float32)  # one call samples the image and both nearnesses
    smooth[:3], smooth[3], smooth[4] = item["image"], item["near_scribble"], item["near_pseudo"]
    smooth[:3] -= mean
    labels = torch.empty(2, height, width, dtype=torch.float32)
    labels[0], labels[1] = item["scribble"], item["pseudo"]
    smooth, labels = _sample(smooth, grid, "bilinear"), _sample(labels.sub_(IGNORE), grid, "nearest").add_(IGNORE)
    image = _rounded(_blur(smooth[:3].add_(mean), rng, ranges))
    (scribble, pseudo), (near_scribble, near_pseudo) = _rounded(labels), _rounded(smooth[3:])
    return {
        "image": image,
        "scribble": scribble,
        "pseudo": pseudo,
        "near_scribble": near_scribble,
        "near_pseudo": near_pseudo,
    }


def _rounded(values: Tensor) -> Tensor:
    """Return uint8; overwrites `values`, since new memory costs more than the arithmetic."""
    return values.add_(0.5).clamp_(0, 255).to(torch.uint8)


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
    grid = torch.empty(2, ranges.crop, ranges.crop, dtype=torch.float32)
    torch.add(x * cosine, y * sine, out=grid[0]).mul_(mirror * (2 / width))
    torch.sub(y * cosine, x * sine, out=grid[1]).mul_(2 / height)
    return grid.permute(1, 2, 0)[None]


def _sample(maps: Tensor, grid: Tensor, mode: str) -> Tensor:
    """(C, H, W) at the positions of the grid; 0 outside."""
    return F.grid_sample(maps[None], grid, mode=mode, padding_mode="zeros", align_corners=False)[0]


def _blur(image: Tensor, rng: Rng, ranges: Augmentation) -> Tensor:
    if not bool(rng.bernoulli("blur", ranges.blur)):
        return image
    low, high = ranges.sigma
    sigma = low + (high - low) * float(rng.uniform("sigma", dtype=torch.float64))
    kernel = torch.exp(-torch.arange(-_RADIUS, _RADIUS + 1, dtype=torch.float32).square() / (2 * sigma * sigma))
    weights = (kernel / kernel.sum()).tolist()
    return _blur_along(_blur_along(image, weights, 2), weights, 1)


def _blur_along(image: Tensor, weights: list[float], dim: int) -> Tensor:
    """Return the image (3, H, W) blurred along one dimension, its edge pixels repeated beyond it.

    A sum of shifted images: a convolution of one channel takes ten times as long on a CPU.
    """
    pad = (_RADIUS, _RADIUS, 0, 0) if dim == 2 else (0, 0, _RADIUS, _RADIUS)
    padded, size = F.pad(image[None], pad, mode="replicate")[0], image.shape[dim]
    out = padded.narrow(dim, _RADIUS, size) * weights[_RADIUS]
    pair = torch.empty_like(out)
    for i in range(_RADIUS):  # the two pixels at one distance have one weight
        torch.add(padded.narrow(dim, i, size), padded.narrow(dim, 2 * _RADIUS - i, size), out=pair)
        out.add_(pair, alpha=weights[i])
    return out
