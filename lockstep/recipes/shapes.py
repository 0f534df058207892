"""The embedded image set: ten drawn shapes, so that a recipe runs before anything is downloaded.

Image i is drawn from (split, i) alone: its class is i modulo 10, and position, size, rotation and colours come from the
keyed generator. Pixels are computed by additions, multiplications, divisions and square roots only, which every machine
rounds alike, and angles come from a table: an image has the same bits on every machine and in every batch.

    Shapes("train")[7]["image"]                 # (3, 32, 32) uint8
    Shapes("val", side=64).__getitems__([3, 4])  # two items, drawn at once

Legend: n images, S pixels per side; x to the right and y up, in units of the shape's size, its centre at 0.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..recipe import Split
from ..rng import Rng

SIZES: dict[Split, int] = {"train": 50_000, "val": 1_000, "test": 1_000}
_SEEDS: dict[Split, int] = {"train": 1, "val": 2, "test": 3}

_TILT = 10
"""Largest rotation either way, in degrees."""
_SHIFT = 0.1
"""Largest offset of the centre from the image's, each way; the image reaches from −1 to 1."""
_SMALLEST, _LARGEST = 0.6, 0.76
"""Half the extent of a shape."""
_SHADE = 0.12
"""Largest darkening of a colour."""

# Bright on dark: every pair differs much in luminance, so that the shape is always visible.
_FOREGROUND = (
    (255, 255, 255),  # white
    (255, 221, 51),  # yellow
    (255, 150, 60),  # orange
    (255, 130, 190),  # pink
    (80, 215, 255),  # cyan
    (120, 235, 90),  # lime
)
_BACKGROUND = (
    (20, 24, 80),  # navy
    (12, 60, 36),  # forest
    (84, 16, 32),  # maroon
    (36, 36, 40),  # charcoal
)


def _length(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt()


# Signed distances to the outline, negative inside. Away from the outline they need only have the right sign.


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return _length(x, y) - 0.9


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (_length(x, y) - 0.72).abs() - 0.22


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.8


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    y = y + 0.2  # the middle of its height, not its centroid, in the image's centre
    return torch.maximum(x.abs() * 0.8660254 + y * 0.5, -y) - 0.56


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return x.abs() * 0.8574929 + y.abs() * 0.5144958 - 0.5144958  # half axes 0.6 and 1


def _plus(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.minimum(x, y) - 0.3, torch.maximum(x, y) - 0.92)


def _hourglass(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum((x - 0.8 * y) * 0.7808688 - 0.05, y - 0.9)  # a slope of 0.8, and a waist


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    """Horns up: like all the others it is its own mirror image, so that flipped images belong to the data."""
    y = y - 0.15
    return torch.maximum(_length(x, y) - 0.98, 0.78 - _length(x, y - 0.58))


def _heart(x: Tensor, y: Tensor) -> Tensor:
    """Two discs, and between them a kite from the notch down to the tip, tangent to both."""
    x, y = x.abs(), y + 0.9
    lobe = _length(x - 0.48, y - 1.3) - 0.5
    kite = torch.maximum(x * 0.7501 - y * 0.6613, x * 0.466 + y * 0.885 - 1.257)
    return torch.minimum(lobe, kite)


def _bars(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum((y.abs() - 0.5).abs() - 0.27, x.abs() - 0.88)


_OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "plus": _plus,
    "hourglass": _hourglass,
    "crescent": _crescent,
    "heart": _heart,
    "bars": _bars,
}

_ANGLES = [math.radians(degrees) for degrees in range(-_TILT, _TILT + 1)]
_COSINES = torch.tensor([math.cos(angle) for angle in _ANGLES], dtype=torch.float32)
_SINES = torch.tensor([math.sin(angle) for angle in _ANGLES], dtype=torch.float32)


class Shapes:
    """`size` images of one split, or as many as the split has by default; `side` pixels high and wide."""

    names: tuple[str, ...] = tuple(_OUTLINES)
    source = "embedded shapes"

    def __init__(self, split: Split, size: int | None = None, side: int = 32):
        if split not in SIZES:
            raise ValueError(f"a split is one of {', '.join(SIZES)}, not {split!r}")
        self.split = split
        self.size = SIZES[split] if size is None else size
        self.side = side
        if self.size < 1 or side < 8:
            raise ValueError(f"size is at least 1 and side at least 8, not {self.size} and {side}; choose larger ones")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        if not len(indices):
            return []
        index = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if int(index.min()) < 0 or int(index.max()) >= self.size:
            raise IndexError(f"the {self.split} split has the images 0 to {self.size - 1}")
        label = index % len(self.names)
        image = self._draw(index, label)
        return [{"image": i, "label": k} for i, k in zip(image.unbind(), label.unbind(), strict=True)]

    def _draw(self, index: Tensor, label: Tensor) -> Tensor:
        """(n, 3, S, S) uint8."""
        rng = Rng.of(_SEEDS[self.split], torch.zeros_like(index), index)
        size = _SMALLEST + (_LARGEST - _SMALLEST) * rng.uniform("size", 1, 1, dtype=torch.float32)
        x, y = self._local(rng, size)
        distance = torch.empty_like(x)
        for k, outline in enumerate(_OUTLINES.values()):
            rows = (label == k).nonzero().squeeze(1)
            if len(rows):
                distance[rows] = outline(x[rows], y[rows])
        # An edge pixel shows as much of the shape as the distance of its centre, in pixels, says.
        cover = (0.5 - distance * size * (self.side / 2)).clamp_(0, 1)
        back = _colour(rng, "background", _BACKGROUND)
        front = _colour(rng, "foreground", _FOREGROUND)
        image = cover[:, None] * (front - back)[:, :, None, None]
        return image.add_(back[:, :, None, None] + 0.5).to(torch.uint8)

    def _local(self, rng: Rng, size: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels' centres in the shape's own coordinates: x and y, each (n, S, S)."""
        centre = (2 * rng.uniform("centre", 2, 1, 1, dtype=torch.float32) - 1) * _SHIFT
        angle = rng.integers("angle", len(_ANGLES), 1, 1)
        cosine, sine = _COSINES[angle] / size, _SINES[angle] / size
        grid = (torch.arange(self.side, dtype=torch.float32) * 2 + (1 - self.side)) / self.side
        x, y = grid[None, None, :] - centre[:, 0], -grid[None, :, None] - centre[:, 1]
        return x * cosine + y * sine, y * cosine - x * sine


def _colour(rng: Rng, name: str, palette: tuple[tuple[int, int, int], ...]) -> Tensor:
    """(n, 3), each from the palette and a little darkened, from 0 to 255."""
    chosen = torch.tensor(palette, dtype=torch.float32)[rng.integers(name, len(palette))]
    return chosen * (1 - _SHADE * rng.uniform(name + " shade", 1, dtype=torch.float32))
