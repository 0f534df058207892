"""Class-conditional image generation on raw pixels: a plain transformer on large patches that predicts the image.

Training: an image x and noise e are joined by a straight line, z = t·x + (1 − t)·s·e, with s the noise scale. The
model answers x̂, the image; what is compared is the velocity that follows from it, (x̂ − z) / (1 − t). Sampling: follow
that velocity from noise at t = 0 to an image at t = 1. An image lies on a thin manifold that a small token can hold,
noise and velocity fill all of pixel space: so the model predicts the image, whatever the loss is in.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...recipe import Batch, Describes, EmbedsData, Generates, Loss, Recipe, Split
from ...rng import Rng
from .. import grids
from ..images import Images, describe
from . import data
from .model import CHANNELS, build, parse

_CHUNK = 64
"""Samples that go through the model at once; guidance doubles it."""
_MOST = 100
"""Samples in one grid; with a thousand classes, those of the first hundred."""
_NEAR = 0.05
"""The distance from the image, in time, below which the loss is not weighted any higher."""
_FULL_NOISE_SIDE = 256
"""Up to this side the noise has scale 1. Larger images have more pixels that tell the same: more noise is needed."""


@dataclass
class JiTOptions:
    model: str = "JiT-B/4"
    """Size and patch size: JiT-{Nano,Ti,S,B,L,H}/ and any patch size, as in JiT-B/4 or JiT-L/16."""
    img_size: int = 64
    """Pixels a side."""
    data_path: str | None = None
    """A folder with one sub-folder of images a class, val and test beside it; without it, drawn shapes."""
    cache_images: str | None = None
    """A folder in which to keep decoded images, for data whose decoding is slower than the training."""
    class_tokens: int = 32
    """Tokens that carry the class beside the patches, in all blocks but the first ones."""
    depth: int | None = None
    """Blocks; by default as many as the size has."""
    dropout: float = 0.0
    """Dropout in the middle half of the blocks; the largest models want 0.2."""
    label_dropout: float = 0.1
    """How often a training image loses its class, for guidance to have something to compare with."""
    flip: bool = True
    """Mirror half of the training images; turn it off where left and right matter."""
    noise_scale: float | None = None
    """Standard deviation of the noise, where pixels are in [-1, 1]; by default 1, above 256 pixels img_size / 256."""
    time_mean: float = -0.8
    """Noise levels in training: t is the sigmoid of a normal number with this mean; lower is noisier."""
    time_std: float = 0.8
    """And with this standard deviation."""
    sample_cfg: tuple[float, ...] = (1.0, 2.9)
    """Guidance of the pictures made while training, one grid each; 1 is none."""
    cfg_interval: tuple[float, float] = (0.1, 1.0)
    """Times between which samples are guided; outside they go their own way."""
    sample_per_class: int = 10
    """Samples of each class in a grid, which holds 100 at most."""
    sample_steps: int = 50
    """Heun steps from noise to image, the last one an Euler step."""

    def __post_init__(self) -> None:
        size, patch = parse(self.model)
        if self.img_size < 8 or self.img_size % patch:
            raise ValueError(
                f"img_size is at least 8 and a multiple of the patch size {patch} of {self.model}, not {self.img_size};"
                f" {max(-(-8 // patch), self.img_size // patch) * patch} would do"
            )
        low, high = self.cfg_interval
        rules: list[tuple[bool, str, Any]] = [
            (self.class_tokens >= 0, "class_tokens is 0 or more", f"{self.class_tokens}; 32 is usual"),
            (self.depth is None or self.depth >= 1, "depth is at least 1", f"{self.depth}; {size.depth} is usual"),
            (0 <= self.dropout < 1, "dropout is in [0, 1)", f"{self.dropout}; 0 is usual"),
            (0 <= self.label_dropout < 1, "label_dropout is in [0, 1)", f"{self.label_dropout}; 0.1 is usual"),
            (
                self.noise_scale is None or _positive(self.noise_scale),
                "noise_scale is more than 0",
                f"{self.noise_scale}; leave it out",
            ),
            (math.isfinite(self.time_mean), "time_mean is a number", f"{self.time_mean}; -0.8 is usual"),
            (_positive(self.time_std), "time_std is more than 0", f"{self.time_std}; 0.8 is usual"),
            (0 <= low < high <= 1, "cfg_interval is two rising times in [0, 1]", f"{low} {high}; 0.1 1 is usual"),
            (self.sample_per_class >= 1, "sample_per_class is at least 1", f"{self.sample_per_class}; 10 is usual"),
            (self.sample_steps >= 1, "sample_steps is at least 1", f"{self.sample_steps}; 50 is usual"),
        ]
        rules += [
            (math.isfinite(cfg) and cfg >= 0, "sample_cfg is 0 or more", f"{cfg}; 1 is none") for cfg in self.sample_cfg
        ]
        for holds, rule, value in rules:
            if not holds:
                raise ValueError(f"{rule}, not {value}")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


class JiTRecipe(Recipe, Generates, EmbedsData, Describes):
    """Pixel diffusion with just an image transformer: x-prediction, velocity loss."""

    Options: ClassVar[type] = JiTOptions
    options: JiTOptions
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
        self._datasets: dict[Split, Images | None] = {}

    def dataset(self, split: Split) -> Images | None:
        if split not in self._datasets:
            options = self.options
            self._datasets[split] = data.load(options.data_path, split, options.img_size, options.cache_images)
        return self._datasets[split]

    @property
    def classes(self) -> int:
        train = self.dataset("train")
        assert train is not None, "every source has training images"
        return len(train.names)

    @property
    def noise_scale(self) -> float:
        given = self.options.noise_scale
        return max(1.0, self.options.img_size / _FULL_NOISE_SIDE) if given is None else given

    def describe_data(self, split: Split) -> str:
        images = self.dataset(split)
        return "" if images is None else describe(images)

    def describe_model(self, model: nn.Module) -> str:
        size, patch = parse(self.options.model)
        blocks = self.options.depth or size.depth
        side = self.options.img_size
        tokens = f"{(side // patch) ** 2} patches and {self.options.class_tokens} class tokens"
        return f"{self.options.model}, {blocks} of {size.depth} blocks, {tokens}, {side} pixels a side"

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
        x = batch["image"].to(torch.get_default_dtype()) / 127.5 - 1
        label = batch["label"]
        if model.training:
            if self.options.flip:
                x = torch.where(rng.bernoulli("flip", 0.5, 1, 1, 1), x.flip(-1), x)
            label = torch.where(rng.bernoulli("drop_label", self.options.label_dropout), self.classes, label)
        e = self.noise_scale * rng.normal("noise", *x.shape[1:])
        t = torch.sigmoid(self.options.time_mean + self.options.time_std * rng.normal("time"))
        at = t[:, None, None, None]
        z = at * x + (1 - at) * e
        rest = (1 - at).clamp(min=_NEAR)
        velocity = (x - z) / rest
        predicted = (model(z, t, label).to(z.dtype) - z) / rest
        error = (predicted - velocity).square()
        return Loss(total=error.sum(), weight=error.numel())

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        n = min(self.options.sample_per_class * self.classes, _MOST)
        return {f"cfg{float(cfg)}": {"n": n, "cfg": float(cfg)} for cfg in self.options.sample_cfg}

    @torch.no_grad()
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
        """(n, frames, 3, S, S) in [0, 1]: the way from noise to image, the image last. Sample i has class i % classes.

        `cfg` is the guidance, `steps` are by default sample_steps, `frames` are evenly spread over the way (13).
        """
        chunks = [
            self._trajectory(model, part % self.classes, Rng(keys), cfg, steps, frames or grids.FRAMES)
            for part, keys in zip(index.split(_CHUNK), rng.keys.split(_CHUNK), strict=True)
        ]
        return torch.cat(chunks)

    def _trajectory(
        self, model: nn.Module, label: Tensor, rng: Rng, cfg: float, steps: int | None, frames: int
    ) -> Tensor:
        side, steps = self.options.img_size, steps or self.options.sample_steps
        z = self.noise_scale * rng.normal("start", CHANNELS, side, side)
        kept = grids.kept_steps(steps, frames)
        states = {0: z}
        for i in range(steps):
            velocity = self._velocity(model, z, i / steps, label, cfg)
            ahead = z + velocity / steps
            if i + 1 < steps:  # not in the last step: at t = 1 there is no velocity
                velocity = (velocity + self._velocity(model, ahead, (i + 1) / steps, label, cfg)) / 2
                ahead = z + velocity / steps
            z = ahead
            if i + 1 in kept:
                states[i + 1] = z
        return torch.stack([((states[k] + 1) / 2).clamp(0, 1) for k in kept], dim=1)

    def _velocity(self, model: nn.Module, z: Tensor, t: float, label: Tensor, cfg: float) -> Tensor:
        """Towards the image that the model sees; guided, away from the one it sees without a class."""
        low, high = self.options.cfg_interval
        guided = cfg != 1 and (low < t < high or t == low == 0)
        time = torch.full_like(z[:, 0, 0, 0], t)
        if guided:
            none = torch.full_like(label, self.classes)
            both = model(z.repeat(2, 1, 1, 1), time.repeat(2), torch.cat([label, none])).to(z.dtype)
            of_class, of_none = both.chunk(2)
            x = of_none + cfg * (of_class - of_none)
        else:
            x = model(z, time, label).to(z.dtype)
        # Not held off from zero as in the loss, where that is a matter of weight: 1 − t is at least one step here, and
        # so the last step ends on the image itself.
        return (x - z) / (1 - t)

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        """A grid as PNG, one class a column, and the way from noise to it as GIF."""
        return grids.save(samples, self.classes, path)

    def write_data(self, folder: Path) -> str:
        return data.write_shapes(folder, self.options.img_size)

    def smoke(self) -> None:
        """Two blocks show what twelve do, in a sixth of the memory: several ranks of a try-out share one machine."""
        self.options.depth = min(2, self.options.depth or parse(self.options.model)[0].depth)
        self.options.sample_steps = 1
        self.options.sample_per_class = 1
        self.options.sample_cfg = self.options.sample_cfg[-1:]
