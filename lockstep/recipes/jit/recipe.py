"""Class-conditional image generation on raw pixels: a plain transformer on large patches that predicts the image.

Training: an image x and noise e are joined by a straight line, z = t·x + (1 − t)·s·e, with s the noise scale. The
model predicts x̂, the image; the loss compares velocities, (x̂ − z) / (1 − t) with (x − z) / (1 − t). Sampling: follow
that velocity from noise at t = 0 to an image at t = 1. Images lie on a low-dimensional manifold that a small token can
hold, noise and velocity fill all of pixel space: so the model predicts the image, whatever the loss is in.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...config import check
from ...recipe import Batch, Loss, Split
from ...rng import Rng
from ..diffusion.recipe import DiffusionOptions, DiffusionRecipe
from ..diffusion.sampling import guided
from ..images import Images
from . import data
from .model import Size, build, parse

_MIN_REMAINING = 0.05
"""Lower bound of 1 − t in the loss, which keeps the weight of nearly clean images finite."""
_UNSCALED_SIDE = 256
"""Up to this side the noise has scale 1. Larger images have more redundant pixels and need more noise."""


@dataclass
class JiTOptions(DiffusionOptions):
    model: str = "JiT-B/4"
    """Size and patch size: JiT-{Nano,Ti,S,B,L,H}/ and any patch size, as in JiT-B/4 or JiT-L/16."""
    img_size: int = 64
    data_path: str | None = None
    """A folder of images with one sub-folder per class, val and test beside it; without it, drawn shapes."""
    sample_cfg: tuple[float, ...] = (1.0, 2.9)
    sample_per_class: int = 10
    """Samples of each class in a grid, which holds 100 at most."""
    sample_steps: int = 50
    """Heun steps from noise to image, the last one an Euler step."""
    cache_images: str | None = None
    """A folder to cache decoded images in, for data whose decoding is slower than the training."""
    class_tokens: int = 32
    """Tokens that carry the class beside the patches, in all blocks but the first ones."""
    dropout: float = 0.0
    """Dropout in the middle half of the blocks; the largest models want 0.2."""
    noise_scale: float | None = None
    """Standard deviation of the noise, where pixels are in [-1, 1]; by default 1, above 256 pixels img_size / 256."""
    time_mean: float = -0.8
    """Noise levels in training: t is the sigmoid of a normal number with this mean; lower is noisier."""
    time_std: float = 0.8
    """And with this standard deviation."""
    cfg_interval: tuple[float, float] = (0.1, 1.0)
    """Times between which samples are guided."""

    def __post_init__(self) -> None:
        size, patch = parse(self.model)
        self.check_shared(patch, size.depth)
        low, high = self.cfg_interval
        scale = 1.0 if self.noise_scale is None else self.noise_scale
        check(self.class_tokens >= 0, "class_tokens is 0 or more", self.class_tokens, "32 is usual")
        check(0 <= self.dropout < 1, "dropout is in [0, 1)", self.dropout, "0 is usual")
        check(math.isfinite(scale) and scale > 0, "noise_scale is more than 0", scale, "leave it out")
        check(math.isfinite(self.time_mean), "time_mean is a number", self.time_mean, "-0.8 is usual")
        finite = math.isfinite(self.time_std)
        check(finite and self.time_std > 0, "time_std is more than 0", self.time_std, "0.8 is usual")
        check(0 <= low < high <= 1, "cfg_interval is two rising times in [0, 1]", f"{low} {high}", "0.1 1 is usual")


class JiTRecipe(DiffusionRecipe):
    """Pixel diffusion with just an image transformer: x-prediction, velocity loss."""

    Options: ClassVar[type] = JiTOptions
    options: JiTOptions
    heun = True
    max_samples = 100
    defaults = {
        "batch_size": 64,
        "epochs": 100,
        "lr": 5e-5,
        "beta2": 0.95,
        "weight_decay": 0.0,
        "optimizer": "adamw",
        "schedule": "constant",
        "warmup_epochs": 5,
        "ema_decay": [0.9999, 0.9996],
        "eval_every": "5ep",
        "save_every": "5ep",
        "sample_every": "10ep",
    }
    presets = {
        # Two to three minutes on two CPU cores with `--nproc 2`: sixteen large patches, many small steps.
        "laptop": {
            "model": "JiT-Nano/8",
            "img_size": 32,
            "class_tokens": 4,
            "global_batch_size": 16,
            "batch_size": 16,
            "n_steps": 1_500,
            "lr": 3e-3,
            "beta2": 0.99,
            "schedule": "cosine",
            "warmup_epochs": 0,
            "warmup_steps": 100,
            "clip_grad": 1.0,
            "ema_decay": [0.99, 0.98],
            "log_every": 10,
            "eval_every": 750,
            "save_every": 750,
            "sample_every": 1_500,
            "sample_cfg": [2.0],
            "sample_per_class": 10,
            "sample_steps": 10,
        },
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        scale = self.options.noise_scale
        self.noise_scale = max(1.0, self.options.img_size / _UNSCALED_SIDE) if scale is None else scale

    @property
    def size(self) -> Size:
        return parse(self.options.model)[0]

    def load(self, split: Split) -> Images | None:
        options = self.options
        return data.load(options.data_path, split, options.img_size, options.cache_images)

    def model(self) -> nn.Module:
        options = self.options
        return build(
            options.model,
            side=options.img_size,
            classes=self.classes,
            class_tokens=options.class_tokens,
            depth=options.depth,
            dropout=options.dropout,
        )

    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        x, label = self.inputs_of(batch, rng, model.training)
        e = self.noise_scale * rng.normal("noise", *x.shape[1:])
        t = torch.sigmoid(self.options.time_mean + self.options.time_std * rng.normal("time"))
        at = t[:, None, None, None]
        z = at * x + (1 - at) * e
        remaining = (1 - at).clamp(min=_MIN_REMAINING)
        velocity = (x - z) / remaining
        predicted = (model(z, t, label).to(z.dtype) - z) / remaining
        error = (predicted - velocity).square()
        return Loss(total=error.sum(), weight=error.numel())

    def velocity(self, model: nn.Module, x: Tensor, progress: float, label: Tensor, cfg: float) -> Tensor:
        """Towards the predicted image. 1 − t is at least one step here: without a bound, the last one ends on it."""
        low, high = self.options.cfg_interval
        inside = low < progress < high or progress == low == 0
        return (guided(model, x, progress, label, self.classes, cfg if inside else 1.0) - x) / (1 - progress)

    def sample(
        self,
        model: nn.Module,
        index: Tensor,
        rng: Rng,
        cfg: float = 2.9,
        steps: int | None = None,
        frames: int | None = None,
        **settings: Any,
    ) -> Tensor:
        return self.trajectories(model, index, rng, cfg, steps, frames)

    def write_data(self, folder: Path) -> str:
        return data.write_shapes(folder, self.options.img_size)

    def describe_model(self, model: nn.Module) -> str:
        side, patch = self.options.img_size, parse(self.options.model)[1]
        tokens = f"{(side // patch) ** 2} patches and {self.options.class_tokens} class tokens"
        return f"{super().describe_model(model)}, {tokens}, {side} pixels per side"
