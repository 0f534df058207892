"""The base of the recipes `dit` and `jit`: images by class, guided sampling, grids of samples.

A subclass has the science: `model`, `loss`, and `velocity`, which sampling follows from noise to image.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...config import check
from ...recipe import Batch, Describes, EmbedsData, Generates, Pictures, Recipe, Split
from ...rng import Rng
from ..images import Images, describe
from . import grids
from .layers import CHANNELS
from .sampling import FRAMES, integrate

CHUNK = 64
"""Samples that go through the model at once; guidance doubles it."""
_SMOKE_DEPTH = 2


@dataclass
class DiffusionOptions:
    model: str
    """Size and patch size of the transformer."""
    img_size: int
    """Pixels per side."""
    depth: int | None = None
    """Number of blocks; by default as many as the size has."""
    data_path: str | None = None
    """A folder of images with one sub-folder per class; without it, drawn shapes."""
    label_dropout: float = 0.1
    """Fraction of training images that lose their class, so that the model also learns without one, for guidance."""
    flip: bool = True
    """Mirror half of the training images; turn it off where left and right matter."""
    sample_cfg: tuple[float, ...] = (1.0,)
    """Guidance of the samples made while training, one grid each; 1 is none."""
    sample_per_class: int = 10
    """Samples of each class in a grid."""
    sample_steps: int = 50
    """Steps from noise to image."""

    def check_shared(self, patch: int, depth: int) -> None:
        """Check the options above; `patch` and `depth` are those that the model's name stands for."""
        fitting = max(-(-8 // patch), self.img_size // patch) * patch
        rule = f"img_size is at least 8 and a multiple of the patch size {patch} of {self.model}"
        check(self.img_size >= 8 and self.img_size % patch == 0, rule, self.img_size, f"{fitting} would do")
        check(self.depth is None or self.depth >= 1, "depth is at least 1", self.depth, f"{depth} is usual")
        check(0 <= self.label_dropout < 1, "label_dropout is in [0, 1)", self.label_dropout, "0.1 is usual")
        check(self.sample_per_class >= 1, "sample_per_class is at least 1", self.sample_per_class, "10 is usual")
        check(self.sample_steps >= 1, "sample_steps is at least 1", self.sample_steps, "50 is usual")
        for cfg in self.sample_cfg:
            check(math.isfinite(cfg) and cfg >= 0, "sample_cfg is 0 or more", cfg, "1 is no guidance")


class DiffusionRecipe(Recipe, Generates, EmbedsData, Pictures, Describes):
    """What `dit` and `jit` share."""

    options: DiffusionOptions
    heun: ClassVar[bool] = False
    """Whether samples are made with Heun's steps rather than Euler's."""
    max_samples: int | None = None
    """Of a grid; with a thousand classes, those of the first so many."""
    noise_scale: float = 1.0
    """Standard deviation of the noise that sampling starts from."""

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._datasets: dict[Split, Images | None] = {}

    @abstractmethod
    def load(self, split: Split) -> Images | None:
        """Return the images of one split, or None if there is no such split."""

    @abstractmethod
    def velocity(self, model: nn.Module, x: Tensor, progress: float, label: Tensor, cfg: float) -> Tensor:
        """Return the guided velocity towards the images; progress runs from 0 (noise) to 1 (image)."""

    @property
    @abstractmethod
    def size(self) -> Any:
        """The size, with its `depth`, that the option `model` names."""

    def dataset(self, split: Split) -> Images | None:
        if split not in self._datasets:
            self._datasets[split] = self.load(split)
        return self._datasets[split]

    @property
    def train_images(self) -> Images:
        images = self.dataset("train")
        assert images is not None, "every source has training images"
        return images

    @property
    def classes(self) -> int:
        return len(self.train_images.names)

    def inputs_of(self, batch: Batch, rng: Rng, training: bool) -> tuple[Tensor, Tensor]:
        """Return images in [-1, 1] and labels; in training half of them flipped, and some without a class."""
        x = batch["image"].to(torch.get_default_dtype()) / 127.5 - 1
        label = batch["label"]
        if training:
            if self.options.flip:
                x = torch.where(rng.bernoulli("flip", 0.5, 1, 1, 1), x.flip(-1), x)
            label = torch.where(rng.bernoulli("drop_label", self.options.label_dropout), self.classes, label)
        return x, label

    def smoke(self) -> None:
        """Two blocks show what twelve do, and several ranks share one machine's memory."""
        self.options.depth = min(_SMOKE_DEPTH, self.options.depth or self.size.depth)
        self.options.sample_steps = 1
        self.options.sample_per_class = 1
        self.max_samples = 2
        self.options.sample_cfg = self.options.sample_cfg[-1:]

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        n = self.options.sample_per_class * self.classes
        n = n if self.max_samples is None else min(n, self.max_samples)
        return {f"cfg{float(cfg)}": {"n": n, "cfg": float(cfg)} for cfg in self.options.sample_cfg}

    @torch.no_grad()
    def trajectories(
        self, model: nn.Module, index: Tensor, rng: Rng, cfg: float, steps: int | None, frames: int | None
    ) -> Tensor:
        """Return (n, frames, 3, S, S) in [0, 1]: from noise to image, the image last. Sample i has class i % classes.

        `cfg` is the guidance, `steps` are by default sample_steps, `frames` are evenly spread over the steps (13).
        """
        chunks = zip(index.split(CHUNK), rng.keys.split(CHUNK), strict=True)
        return torch.cat([self.trajectory(model, part, Rng(keys), cfg, steps, frames) for part, keys in chunks])

    def trajectory(
        self, model: nn.Module, index: Tensor, rng: Rng, cfg: float, steps: int | None, frames: int | None
    ) -> Tensor:
        """The same, all samples at once."""
        label, side = index % self.classes, self.options.img_size

        def velocity(x: Tensor, progress: float) -> Tensor:
            return self.velocity(model, x, progress, label, cfg)

        noise = self.noise_scale * rng.normal("start", CHANNELS, side, side)
        return integrate(velocity, noise, steps or self.options.sample_steps, frames or FRAMES, self.heun)

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        """Write a grid as PNG, one class per column, and the trajectory as GIF."""
        return grids.save(samples, self.classes, path)

    def picture_of(self, item: dict[str, Tensor]) -> tuple[Tensor, str]:
        return item["image"], self.train_images.names[int(item["label"])]

    def describe_model(self, model: nn.Module) -> str:
        return f"{self.options.model}, {self.options.depth or self.size.depth} of {self.size.depth} blocks"

    def describe_data(self, split: Split) -> str:
        images = self.dataset(split)
        return "" if images is None else describe(images)
