"""Class-conditional image generation: a diffusion transformer trained by rectified flow.

Training: an image x and noise z are joined by a straight line, x_t = (1 − t)·x + t·z, and the model learns the
velocity z − x along it. Sampling: follow the velocity from noise at t = 1 to an image at t = 0.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...recipe import Batch, Describes, EmbedsData, Generates, Loss, Recipe, Scores, Split, SumOverRanks
from ...rng import Rng
from .. import frechet, grids, images
from ..features import Unavailable
from .model import CHANNELS, build, parse

_CHUNK = 64
"""Samples that go through the model at once; guidance doubles it."""


@dataclass
class DiTOptions:
    model: str = "DiT-S/2"
    """Size and patch size: DiT-{Nano,Ti,S,B,L,XL}/{2,4,8}."""
    num_register_tokens: int = 0
    """Learned tokens beside the patches, for what belongs to no place in the image."""
    depth: int | None = None
    """Blocks; by default as many as the size has."""
    img_size: int = 32
    """Pixels a side."""
    data_path: str | None = None
    """CIFAR-10's binary files, or a folder with one sub-folder of images a class; without it, drawn shapes."""
    label_dropout: float = 0.1
    """How often a training image loses its class, for guidance to have something to compare with."""
    qk_norm: bool = False
    """Normalise queries and keys, against attention that grows without bound."""
    flip: bool = True
    """Mirror half of the training images; turn it off where left and right matter."""
    sample_cfg: tuple[float, ...] = (1.0, 2.5, 5.0)
    """Guidance of the pictures made while training, one grid each; 1 is none."""
    sample_per_class: int = 10
    """Samples of each class in a grid."""
    sample_steps: int = 50
    """Euler steps from noise to image."""
    fid_every: int = 50_000
    """Steps between two measurements of how far samples are from the data; a run that long also ends with one."""
    fid_samples: int = 10_000
    """Samples of the averaged weights that are compared with the whole training set."""
    fid_weights: str | None = None
    """Inception-v3's weights as pytorch-fid publishes them; without, it is fd_efficientnet and not FID."""
    fid_cfg: float = 5.0
    """Guidance of the samples that are compared."""
    fid_steps: int = 25
    """Euler steps of the samples that are compared."""

    def __post_init__(self) -> None:
        _, patch = parse(self.model)
        if self.img_size < 8 or self.img_size % patch:
            raise ValueError(
                f"img_size is at least 8 and a multiple of the patch size {patch} of {self.model}, not {self.img_size};"
                f" {max(8, self.img_size // patch * patch)} would do"
            )
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth is at least 1, not {self.depth}; leave it out for that of {self.model}")
        if self.num_register_tokens < 0:
            raise ValueError(f"num_register_tokens is 0 or more, not {self.num_register_tokens}; 4 or 8 are usual")
        if not 0 <= self.label_dropout < 1:
            raise ValueError(f"label_dropout is in [0, 1), not {self.label_dropout}; 0.1 is usual")
        if self.sample_per_class < 1 or self.sample_steps < 1:
            raise ValueError(
                f"sample_per_class and sample_steps are at least 1, not {self.sample_per_class} and"
                f" {self.sample_steps}; 10 and 50 are usual"
            )
        if self.fid_every < 0 or self.fid_samples < 2 or self.fid_steps < 1:
            raise ValueError(
                f"fid_every is at least 0, fid_samples 2 and fid_steps 1, not {self.fid_every}, {self.fid_samples} and"
                f" {self.fid_steps}; 50000, 10000 and 25 are usual"
            )
        if self.fid_weights and not Path(self.fid_weights).is_file():
            raise ValueError(f"fid_weights is a file, {self.fid_weights} is not there; leave it out or correct it")
        if not all(math.isfinite(cfg) and cfg >= 0 for cfg in self.sample_cfg):
            raise ValueError(f"sample_cfg are numbers of 0 or more, not {self.sample_cfg}; 1 is no guidance")


class DiTRecipe(Recipe, Generates, Scores, EmbedsData, Describes):
    """Diffusion transformer with register tokens, trained by rectified flow."""

    Options: ClassVar[type] = DiTOptions
    options: DiTOptions
    defaults = {
        "batch_size": 128,
        "n_steps": 200_000,
        "lr": 1e-4,
        "ema_decay": [0.9999],
        "sample_every": 10_000,
        "save_every": 5_000,
        "eval_every": 5_000,
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "schedule": "constant",
    }
    presets = {
        # About two minutes on two CPU cores with `--nproc 2`: small images, few tokens, many small steps.
        "laptop": {
            "model": "DiT-Nano/4",
            "qk_norm": True,
            "global_batch_size": 16,
            "batch_size": 16,
            "n_steps": 1_200,
            "lr": 5e-3,
            "beta2": 0.99,
            "schedule": "cosine",
            "warmup_steps": 100,
            "clip_grad": 1.0,
            "ema_decay": [0.99],
            "log_every": 10,
            "eval_every": 600,
            "save_every": 600,
            "sample_every": 1_200,
            "sample_cfg": [2.5],
            "sample_per_class": 10,
            "sample_steps": 25,
            "fid_every": 0,
        },
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._datasets: dict[Split, images.Images | None] = {}

    def dataset(self, split: Split) -> images.Images | None:
        if split not in self._datasets:
            self._datasets[split] = images.load(self.options.data_path, split, self.options.img_size)
        return self._datasets[split]

    @property
    def classes(self) -> int:
        train = self.dataset("train")
        assert train is not None, "every source has training images"
        return len(train.names)

    def describe_data(self, split: Split) -> str:
        found = self.dataset(split)
        return "" if found is None else images.describe(found)

    def model(self) -> nn.Module:
        return build(
            self.options.model,
            side=self.options.img_size,
            classes=self.classes,
            registers=self.options.num_register_tokens,
            qk_norm=self.options.qk_norm,
            depth=self.options.depth,
        )

    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        x = batch["image"].to(torch.get_default_dtype()) / 127.5 - 1
        label = batch["label"]
        if model.training:
            if self.options.flip:
                x = torch.where(rng.bernoulli("flip", 0.5, 1, 1, 1), x.flip(-1), x)
            label = torch.where(rng.bernoulli("drop_label", self.options.label_dropout), self.classes, label)
        z = rng.normal("noise", *x.shape[1:])
        t = torch.sigmoid(rng.normal("time"))
        at = t[:, None, None, None]
        velocity = model((1 - at) * x + at * z, t, label)
        target = z - x
        error = (velocity.to(target.dtype) - target).square()
        return Loss(total=error.sum(), weight=error.numel())

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        n = self.options.sample_per_class * self.classes
        return {f"cfg{float(cfg)}": {"n": n, "cfg": float(cfg)} for cfg in self.options.sample_cfg}

    @torch.no_grad()
    def sample(
        self,
        model: nn.Module,
        index: Tensor,
        rng: Rng,
        cfg: float = 2.5,
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
        self,
        model: nn.Module,
        label: Tensor,
        rng: Rng,
        cfg: float = 2.5,
        steps: int | None = None,
        frames: int = grids.FRAMES,
    ) -> Tensor:
        side, steps = self.options.img_size, steps or self.options.sample_steps
        x = rng.normal("start", CHANNELS, side, side)
        kept = grids.kept_steps(steps, frames)
        states = {0: x}
        for i in range(steps):
            # Steps of 1/N start at 1, 1 − 1/N, ... 1/N: the end, t = 0, is reached and never evaluated.
            t = torch.full_like(x[:, 0, 0, 0], 1 - i / steps)
            x = x - self._velocity(model, x, t, label, cfg) / steps
            if i + 1 in kept:
                states[i + 1] = x
        return torch.stack([((states[k] + 1) / 2).clamp(0, 1) for k in kept], dim=1)

    def _velocity(self, model: nn.Module, x: Tensor, t: Tensor, label: Tensor, cfg: float) -> Tensor:
        """Guided: away from the velocity without a class, through the one with it, by the factor `cfg`."""
        if cfg == 1:
            return model(x, t, label).to(x.dtype)
        none = torch.full_like(label, self.classes)
        both = model(x.repeat(2, 1, 1, 1), t.repeat(2), torch.cat([label, none])).to(x.dtype)
        v_class, v_none = both.chunk(2)
        return v_none + cfg * (v_class - v_none)

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        """A grid as PNG, one class a column, and the way from noise to it as GIF."""
        return grids.save(samples, self.classes, path)

    @property
    def score_every(self) -> int:
        return int(self.options.fid_every)

    def score(self, model: nn.Module, total: SumOverRanks, folder: Path) -> tuple[dict[str, float], str | None]:
        """The Fréchet distance of samples to the training set; statistics of the latter are kept beside it."""
        train = self.dataset("train")
        assert train is not None, "every source has training images"
        device = next(model.parameters()).device
        try:
            measure = frechet.Distance(train, self.options.fid_weights, device)
        except Unavailable as missing:
            return {}, str(missing)

        def generate(numbers: range, rng: Rng) -> Tensor:
            label = torch.tensor(list(numbers), device=device) % self.classes
            return self._trajectory(model, label, rng, self.options.fid_cfg, self.options.fid_steps, frames=1)[:, 0]

        where = Path(self.options.data_path) if self.options.data_path else folder
        count = self.options.fid_samples
        return {measure.name: measure(total, count, 4 * _CHUNK, generate, where / ".lockstep")}, None

    def write_data(self, folder: Path) -> str:
        """The embedded shapes as an image folder, one sub-folder a class."""
        return images.write_folder(folder, {"train": 2_000, "val": 200}, self.options.img_size)

    def describe_model(self, model: nn.Module) -> str:
        (_, blocks, _), _ = parse(self.options.model)
        return f"{self.options.model}, {self.options.depth or blocks} of {blocks} blocks"

    def smoke(self) -> None:
        """Two blocks show what twelve do, and several ranks of a try-out share one machine's memory and disk."""
        self.options.depth = min(2, self.options.depth or parse(self.options.model)[0][1])
        self.options.fid_every = 0
        self.options.sample_steps = 1
        self.options.sample_per_class = 1
        self.options.sample_cfg = self.options.sample_cfg[-1:]
