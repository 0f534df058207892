"""Class-conditional image generation: a diffusion transformer trained by rectified flow.

Training: an image x and noise z are joined by a straight line, x_t = (1 − t)·x + t·z, and the model learns the
velocity z − x along it. Sampling: follow the velocity from noise at t = 1 to an image at t = 0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...config import check
from ...recipe import Batch, Loss, Scores, Split, SumOverRanks
from ...rng import Rng
from .. import images
from ..diffusion import frechet
from ..diffusion.features import Unavailable
from ..diffusion.recipe import CHUNK, DiffusionOptions, DiffusionRecipe
from ..diffusion.sampling import guided
from .model import Size, build, parse

_EMBEDDED: dict[Split, int] = {"train": 2_000, "val": 200}
"""Images of the embedded set that `lockstep data` writes."""


@dataclass
class DiTOptions(DiffusionOptions):
    model: str = "DiT-S/2"
    """Size and patch size: DiT-{Nano,Ti,S,B,L,XL}/{2,4,8}."""
    img_size: int = 32
    data_path: str | None = None
    """CIFAR-10's binary files, or a folder of images with one sub-folder per class; without it, drawn shapes."""
    sample_cfg: tuple[float, ...] = (1.0, 2.5, 5.0)
    num_register_tokens: int = 0
    """Learned tokens beside the patches, for information that belongs to no position of the image."""
    qk_norm: bool = False
    """Normalise queries and keys, against attention that grows without bound."""
    fid_every: int = 50_000
    """Steps between two measurements of the distance of samples to the data; a run that long also ends with one."""
    fid_samples: int = 10_000
    """Samples of the averaged weights that are compared with the whole training set."""
    fid_weights: str | None = None
    """Inception-v3's weights as pytorch-fid publishes them; without, it is fd_efficientnet and not FID."""
    fid_cfg: float = 5.0
    """Guidance of the samples that are compared."""
    fid_steps: int = 25
    """Euler steps of the samples that are compared."""

    def __post_init__(self) -> None:
        size, patch = parse(self.model)
        self.check_shared(patch, size.depth)
        registers = self.num_register_tokens
        check(registers >= 0, "num_register_tokens is 0 or more", registers, "4 or 8 are usual")
        check(self.fid_every >= 0, "fid_every is at least 0", self.fid_every, "50000 is usual")
        check(self.fid_samples >= 2, "fid_samples is at least 2", self.fid_samples, "10000 is usual")
        check(self.fid_steps >= 1, "fid_steps is at least 1", self.fid_steps, "25 is usual")
        found = self.fid_weights is None or Path(self.fid_weights).is_file()
        check(found, "fid_weights is a file", f"{self.fid_weights}, which does not exist", "correct it or leave it out")


class DiTRecipe(DiffusionRecipe, Scores):
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

    @property
    def size(self) -> Size:
        return parse(self.options.model)[0]

    def load(self, split: Split) -> images.Images | None:
        return images.load(self.options.data_path, split, self.options.img_size)

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
        x, label = self.inputs_of(batch, rng, model.training)
        z = rng.normal("noise", *x.shape[1:])
        t = torch.sigmoid(rng.normal("time"))
        at = t[:, None, None, None]
        velocity = model((1 - at) * x + at * z, t, label)
        target = z - x
        error = (velocity.to(target.dtype) - target).square()
        return Loss(total=error.sum(), weight=error.numel())

    def smoke(self) -> None:
        super().smoke()
        self.options.fid_every = 0

    def velocity(self, model: nn.Module, x: Tensor, progress: float, label: Tensor, cfg: float) -> Tensor:
        """The model's velocity points from image to noise. At t = 0, the end, it is never evaluated."""
        return -guided(model, x, 1 - progress, label, self.classes, cfg)

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
        return self.trajectories(model, index, rng, cfg, steps, frames)

    @property
    def score_every(self) -> int:
        return self.options.fid_every

    def score(
        self, model: nn.Module, sum_over_ranks: SumOverRanks, folder: Path
    ) -> tuple[dict[str, float], str | None]:
        """The Fréchet distance of samples to the training set, whose statistics are cached beside the data."""
        options, device = self.options, next(model.parameters()).device
        try:
            distance = frechet.Distance(self.train_images, options.fid_weights, device)
        except Unavailable as missing:
            return {}, str(missing)

        def generate(numbers: range, rng: Rng) -> Tensor:
            index = torch.tensor(list(numbers), device=device)
            return self.trajectory(model, index, rng, options.fid_cfg, options.fid_steps, frames=1)[:, 0]

        cache = (Path(options.data_path) if options.data_path else folder) / ".lockstep"
        return {distance.name: distance(sum_over_ranks, options.fid_samples, 4 * CHUNK, generate, cache)}, None

    def write_data(self, folder: Path) -> str:
        return images.write_folder(folder, _EMBEDDED, self.options.img_size)
