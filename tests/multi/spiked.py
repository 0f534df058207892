"""A recipe with one sample that is wrong by far, for tests that look for it."""

from typing import ClassVar

import torch
from tiny import Points, Tiny
from torch import Tensor

from lockstep import Pictures


class SpikedPoints(Points):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = super().__getitem__(i)
        return {**item, "y": item["y"] + 1000 * (i == Spiked.bad_sample)}


class Spiked(Tiny, Pictures):
    """The tiny one; the label of one sample is far from the curve. A picture has the grey level of its size."""

    name = "spiked"
    bad_sample: ClassVar[int] = 405

    def dataset(self, split: str) -> Points:
        return SpikedPoints(self.options.size)

    def picture_of(self, item: dict[str, Tensor]) -> tuple[Tensor, str]:
        size = item["y"].abs().max()
        return torch.full((3, 8, 16), int(size.clamp(max=255)), dtype=torch.uint8), f"[{size:.0f}]"
