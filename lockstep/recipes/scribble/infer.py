"""Class probabilities for images of any size: the mean over several scales and sliding windows.

Legend: K classes, H × W pixels.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW_BATCH = 8
"""Windows that go through the model together."""

Model = Callable[[Tensor], Tensor]


def probabilities(model: Model, image: Tensor, crop: int, scales: Sequence[float], base: int) -> Tensor:
    """Class probabilities (K, H, W) of an image (3, H, W), normalised: the mean over the scales.

    At scale s the longer side has s·base pixels; with base 0, s times its own.
    """
    height, width = image.shape[1:]
    unit = (base or max(height, width)) / max(height, width)
    total = None
    for scale in scales:
        size = (max(1, round(height * unit * scale)), max(1, round(width * unit * scale)))
        resized = image[None] if size == (height, width) else F.interpolate(image[None], size, mode="bilinear")
        part = sliding_window(model, resized, crop)
        part = part if size == (height, width) else F.interpolate(part, (height, width), mode="bilinear")
        total = part if total is None else total + part
    assert total is not None, "there is at least one scale"
    return total[0] / len(scales)


def sliding_window(model: Model, image: Tensor, crop: int) -> Tensor:
    """Probabilities (1, K, H, W) of an image (1, 3, H, W), the mean over all windows that contain a pixel.

    Windows have `crop` pixels per side, or the image's where that is less, and a stride of two thirds of that.
    """
    height, width = image.shape[2:]
    h, w = min(crop, height), min(crop, width)
    corners = [(top, left) for top in _starts(height, h) for left in _starts(width, w)]
    total, count = None, torch.zeros(height, width, dtype=image.dtype, device=image.device)
    for batch in _chunks(corners):
        windows = torch.cat([image[:, :, top : top + h, left : left + w] for top, left in batch])
        parts = model(windows).to(image.dtype).softmax(1)
        if total is None:
            total = parts.new_zeros(1, parts.shape[1], height, width)
        for (top, left), part in zip(batch, parts, strict=True):
            total[0, :, top : top + h, left : left + w] += part
            count[top : top + h, left : left + w] += 1
    assert total is not None
    return total / count


def _starts(extent: int, window: int) -> list[int]:
    """Return where windows begin: two thirds of a window apart, the last one at the edge."""
    stride = max(1, -(-2 * window // 3))
    return [*range(0, extent - window, stride), extent - window]


def _chunks(corners: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    return (corners[i : i + _WINDOW_BATCH] for i in range(0, len(corners), _WINDOW_BATCH))
