"""The embedded data: drawn scenes of coloured, textured shapes, labelled like scribble data sets.

Scene i is drawn from (split, i) alone. An item has the image, its true labels, scribbles (a stroke through most shapes
and two over the background, 255 elsewhere), pseudo labels as an image-level model would predict them (wrong at edges,
255 where uncertain, some shapes missed or confused), and the nearness of each pixel to a scribble and to a
pseudo-labelled shape (255 on it, falling to 0).

    Scenes("train", side=96)[7]["scribble"]      # (96, 72) or (72, 96) uint8

Legend: H × W pixels; x to the right and y down, in units of a shape's size, its centre at 0.
"""

import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...recipe import Split
from ...rng import Rng
from ..confusion import IGNORE

MAPS = ("label", "scribble", "pseudo", "near_scribble", "near_pseudo")
_PLANES = 3 + len(MAPS)
_MOST_MEMORY = 1 << 30
"""Bytes of drawn scenes that are kept."""
SIZES: dict[Split, int] = {"train": 480, "val": 48, "test": 48}
_SEEDS: dict[Split, int] = {"train": 11, "val": 12, "test": 13}

_FEWEST, _MOST = 2, 5
"""Shapes per scene."""
_SMALLEST, _LARGEST = 0.15, 0.25
"""Size of a shape, as a fraction of the scene's longer side."""
_MISSED, _CONFUSED = 0.1, 0.1
"""Probability that a pseudo label misses a shape, or confuses its class."""
_NEAR = 1 / 8
"""Distance at which nearness is 0, as a fraction of the scene's longer side."""


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt() - 0.95


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.82


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() * 0.8660254 - y * 0.5, y) - 0.58


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return ((x * x + y * y).sqrt() - 0.72).abs() - 0.3


def _cross(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.minimum(x, y) - 0.36, torch.maximum(x, y) - 1.0)


_OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "ring": _ring,
    "cross": _cross,
}
"""Signed distances to the outline, negative inside."""
NAMES = ("background", *_OUTLINES)

# A class has a hue and a texture of its own: stripes across and along, with so many periods in a shape's size.
_COLOURS = torch.tensor([[215, 60, 55], [60, 105, 220], [235, 200, 60], [60, 180, 95], [175, 80, 195]]).float()
_STRIPES = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [1.5, 1.5], [0.0, 0.0]], dtype=torch.float32)
_GROUND = torch.tensor([[95, 95, 100], [140, 125, 105], [70, 85, 85], [165, 165, 160]]).float()

_ANGLES = [math.radians(degrees) for degrees in range(0, 360, 5)]
_COSINES = torch.tensor([math.cos(angle) for angle in _ANGLES], dtype=torch.float32)
_SINES = torch.tensor([math.sin(angle) for angle in _ANGLES], dtype=torch.float32)


class Scenes:
    """`size` scenes of one split, `side` pixels along their longer side."""

    source = "embedded scenes"

    def __init__(self, split: Split, side: int, size: int | None = None):
        if side < 32:
            raise ValueError(f"a scene is at least 32 pixels along its longer side, not {side}")
        self.split, self.side = split, side
        self.size = SIZES[split] if size is None else size
        self._drawn = Drawn(self.size, side)

    def __len__(self) -> int:
        return self.size

    def name(self, i: int) -> str:
        return f"{self.split}_{i:05d}"

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.size:
            raise IndexError(f"the {self.split} split has the scenes 0 to {self.size - 1}")
        if (item := self._drawn.get(i)) is None:
            item = _draw(Rng.of(_SEEDS[self.split], torch.zeros(1, dtype=torch.int64), torch.tensor([i])), self.side)
            self._drawn.keep(i, item)
        return item


class Drawn:
    """Scenes that have been drawn, in memory shared with forked processes: a loader draws each once, not every epoch.

    Memory is used as it is filled. Two processes that draw the same scene write the same bytes.
    """

    def __init__(self, size: int, side: int):
        self._arguments = size, side
        self._long, self._short = side, side * 3 // 4
        row = 1 + _PLANES * self._long * self._short
        self._kept = size if size * row <= _MOST_MEMORY else 0
        memory = mmap.mmap(-1, max(1, self._kept * row))
        self._rows = np.frombuffer(memory, dtype=np.uint8, count=self._kept * row).reshape(self._kept, row)
        """Of each scene: 0 as long as it has not been drawn, 1 for upright, 2 for wide; then its maps."""

    def get(self, i: int) -> dict[str, Tensor] | None:
        """Return a copy of scene i, or None if it is not here."""
        if i >= self._kept or not (kind := self._rows[i, 0]):
            return None
        size = (self._long, self._short) if kind == 1 else (self._short, self._long)
        planes = torch.from_numpy(self._rows[i, 1:].copy()).view(_PLANES, *size)
        return {"image": planes[:3]} | dict(zip(MAPS, planes[3:], strict=True))

    def keep(self, i: int, item: dict[str, Tensor]) -> None:
        if i < self._kept:
            planes = torch.cat([item["image"], torch.stack([item[name] for name in MAPS])])
            self._rows[i, 1:] = planes.flatten().numpy()
            self._rows[i, 0] = 1 if planes.shape[1] == self._long else 2  # last: from here on it can be read

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that is not forked gets an empty one."""
        return Drawn, self._arguments


def _draw(rng: Rng, side: int) -> dict[str, Tensor]:
    """image (3, H, W), label, scribble, pseudo, near_scribble and near_pseudo (H, W), all uint8."""
    short = side * 3 // 4
    height, width = (side, short) if rng.bernoulli("portrait", 0.5) else (short, side)
    count = _FEWEST + int(rng.integers("count", _MOST - _FEWEST + 1))
    kinds = rng.integers("kind", len(_OUTLINES), _MOST)[0, :count]
    layout = rng.uniform("place", _MOST, 3, dtype=torch.float32)[0, :count]
    sizes = side * (_SMALLEST + (_LARGEST - _SMALLEST) * layout[:, 2])
    centres = (0.12 + 0.76 * layout[:, :2]) * torch.tensor([width, height])
    turns = rng.integers("turn", len(_ANGLES), _MOST)[0, :count]
    x, y = _local(height, width, centres, turns, sizes)  # (count, H, W)
    # In pixels, so that edges and margins do not depend on the size of a shape.
    distance = torch.stack([list(_OUTLINES.values())[k](x[i], y[i]) * sizes[i] for i, k in enumerate(kinds.tolist())])
    label = _paint(distance < 0, kinds + 1)
    pseudo = _pseudo(rng, distance, kinds, sizes)
    scribble = _scribble(rng, distance, label, kinds, x, y, sizes)
    reach = max(2, round(side * _NEAR))
    return {
        "image": _image(rng, distance, kinds, x, y),
        "label": label,
        "scribble": scribble,
        "pseudo": pseudo,
        "near_scribble": nearness(scribble != IGNORE, reach),
        "near_pseudo": nearness((pseudo != 0) & (pseudo != IGNORE), reach),
    }


def _local(height: int, width: int, centres: Tensor, turns: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The pixels in each shape's own rotated coordinates, in units of its size."""
    cosine, sine = (table[turns] / sizes for table in (_COSINES, _SINES))
    x = torch.arange(width, dtype=torch.float32)[None, None, :] + 0.5 - centres[:, 0, None, None]
    y = torch.arange(height, dtype=torch.float32)[None, :, None] + 0.5 - centres[:, 1, None, None]
    cosine, sine = cosine[:, None, None], sine[:, None, None]
    return x * cosine + y * sine, y * cosine - x * sine


def _paint(inside: Tensor, labels: Tensor) -> Tensor:
    """(H, W) uint8: later shapes cover earlier ones."""
    canvas = torch.zeros(inside.shape[1:], dtype=torch.int64)
    for mask, label in zip(inside, labels, strict=True):
        canvas = torch.where(mask, label, canvas)
    return canvas.to(torch.uint8)


def _image(rng: Rng, distance: Tensor, kinds: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(3, H, W) uint8."""
    height, width = distance.shape[1:]
    corners = _GROUND[rng.integers("ground", len(_GROUND), 2)[0]].T[:, None, :]  # a gradient from one to the other
    image = F.interpolate(corners[None], (height, width), mode="bilinear")[0]
    blotches = rng.uniform("blotches", 1, 8, 8, dtype=torch.float32)
    image = image + 60 * (F.interpolate(blotches, (height, width), mode="bilinear")[0] - 0.5)
    shades = 50 * (rng.uniform("shade", _MOST, 3, dtype=torch.float32)[0] - 0.5)
    for i, kind in enumerate(kinds.tolist()):
        phase = _STRIPES[kind, 0] * x[i] + _STRIPES[kind, 1] * y[i]
        dark = (phase - phase.floor() < 0.5) & bool(_STRIPES[kind].any())
        paint = (_COLOURS[kind] + shades[i])[:, None, None] * (1 - 0.45 * dark.float())
        image = image + (0.5 - distance[i]).clamp(0, 1) * (paint - image)
    noise = 30 * (rng.uniform("noise", height, width, dtype=torch.float32) - 0.5)
    return (image + noise + 0.5).clamp(0, 255).to(torch.uint8)


def _pseudo(rng: Rng, distance: Tensor, kinds: Tensor, sizes: Tensor) -> Tensor:
    """Labels as a class-activation model gives them: mostly right inside, wrong at edges, some of another class."""
    wobble = rng.uniform("wobble", _MOST, 1, 4, 4, dtype=torch.float32)[0, : len(kinds)] - 0.5
    wobble = F.interpolate(wobble, distance.shape[1:], mode="bilinear")[:, 0]
    growth = 0.3 * (rng.uniform("growth", _MOST, dtype=torch.float32)[0, : len(kinds)] - 0.5)
    predicted = distance + (0.6 * wobble + growth[:, None, None]) * sizes[:, None, None]
    other = (kinds + 1 + rng.integers("other", len(_OUTLINES) - 1, _MOST)[0, : len(kinds)]) % len(_OUTLINES)
    label = 1 + torch.where(rng.bernoulli("mistaken", _CONFUSED, _MOST)[0, : len(kinds)], other, kinds)
    seen = ~rng.bernoulli("missed", _MISSED, _MOST)[0, : len(kinds), None, None]
    margin = 0.08 * sizes[:, None, None]
    masks = torch.stack([(predicted < margin) & seen, (predicted < -margin) & seen], 1).flatten(0, 1)
    return _paint(masks, torch.stack([torch.full_like(label, IGNORE), label], 1).flatten())


def _scribble(rng: Rng, distance: Tensor, label: Tensor, kinds: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """A bent stroke along each shape and two over the background, with a margin to other classes."""
    height, width = label.shape
    pen = max(1.0, 0.006 * max(height, width))
    scribble = torch.full_like(label, IGNORE)
    bends = rng.uniform("bend", _MOST + 2, 3, dtype=torch.float32)[0] - 0.5
    covered = torch.zeros_like(label, dtype=torch.bool)
    for i in reversed(range(len(kinds))):
        path = (y[i] - bends[i, 0] * (1 - 2 * x[i] * x[i])) * sizes[i]
        marked = (path.abs() < pen) & (distance[i] < -0.1 * sizes[i]) & ~covered
        scribble = torch.where(marked, (kinds[i] + 1).to(torch.uint8), scribble)
        covered = covered | (distance[i] < 2 * pen)  # no scribble close to the edge of a shape above
    turns = rng.integers("background turn", len(_ANGLES), 2)[0]
    centres = (bends[_MOST:, :2] + 0.5) * torch.tensor([width, height])
    u, v = _local(height, width, centres, turns, torch.full((2,), float(max(height, width)), dtype=torch.float32))
    paths = (v - bends[_MOST:, 2, None, None] * u * u).abs() * max(height, width) < pen
    clear = distance.amin(0) > 3 * pen
    return torch.where(paths.any(0) & clear, torch.zeros_like(scribble), scribble)


def nearness(marked: Tensor, reach: int) -> Tensor:
    """255 where `marked` (H, W), falling linearly with the distance to it, 0 from `reach` pixels on; uint8.

    The Euclidean distance is exact up to `reach`: first along rows, then the minimum over rows, in squares of integers.
    """
    kind = np.int16 if 2 * reach * reach < 1 << 15 else np.int32
    places, on, far = np.arange(marked.shape[1], dtype=np.int32), marked.numpy(), 2 * (marked.shape[1] + reach)
    left = np.maximum.accumulate(np.where(on, places, -far), axis=1)
    right = np.minimum.accumulate(np.where(on, places, far)[:, ::-1], axis=1)[:, ::-1]
    along = np.minimum(np.minimum(places - left, right - places), reach).astype(kind)
    best, height = np.square(along), len(on)
    padded = np.pad(best, ((reach, reach), (0, 0)), constant_values=reach * reach)
    square = np.empty_like(best)
    for shift in range(1, reach):
        np.minimum(padded[reach - shift :][:height], padded[reach + shift :][:height], out=square)
        np.add(square, kind(shift * shift), out=square)
        np.minimum(best, square, out=best)
    squares = torch.arange(reach * reach + 1, dtype=torch.float32)
    values = (255 * (1 - squares.sqrt() / reach).clamp(min=0) + 0.5).to(torch.uint8)
    return torch.from_numpy(values.numpy()[best])
