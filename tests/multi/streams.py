"""Recipes whose training set is iterable: of a known length or not, and one that is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tiny
import torch
from tiny import Points, Tiny
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep import Augments, Rng
from multi import gan

Kind = Literal["unknown", "sized", "short", "split", "later"]


@dataclass
class Options(tiny.Options):
    """Flags of the recipe."""

    size: int = 53
    """Items in an epoch."""
    kind: Kind = "unknown"
    """Whether it has a length, the wrong one, or yields other items on each rank: at once, or after the first."""


@dataclass
class GanOptions(gan.Options):
    """Flags of the GAN."""

    kind: Kind = "unknown"
    """The same."""


class Read(IterableDataset[dict[str, Tensor]]):
    """Points in an order that changes with the epoch."""

    def __init__(self, options: Any):
        self.points, self.options, self.epoch = Points(options.size), options, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.options.size):
            own = torch.distributed.is_initialized() and torch.distributed.get_rank()
            shift = own if self.options.kind == "split" or (self.options.kind == "later" and number) else 0
            yield self.points[(number * 7 + self.epoch + shift) % self.options.size]


class Sized(Read):
    def __len__(self) -> int:
        return self.options.size + (self.options.kind == "short")


class Streamed(Tiny, Augments):
    """A training set that is read; points are moved a little."""

    name = "streamed"
    Options = Options
    defaults = {**Tiny.defaults, "batch_size": 4, "global_batch_size": 14, "log_every": 1}

    def dataset(self, split: str) -> Any:
        kind = Read if self.options.kind in ("unknown", "split", "later") else Sized
        return kind(self.options) if split == "train" else Points(31)

    def augment(self, item: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        return {**item, "x": item["x"] + 0.01 * rng.normal("shift", 6, dtype=item["x"].dtype)[0]}


class StreamedGan(gan.Gan):
    """Two steps with each batch that is read."""

    name = "streamed_gan"
    Options = GanOptions

    def dataset(self, split: str) -> Any:
        return Read(self.options) if split == "train" else Points(31)
