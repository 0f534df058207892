"""The two recipes that are trained under faults: a small one of its own, and `vision` at its smallest."""

from pathlib import Path
from typing import Any

import torch
from inject import install
from torch import Tensor, nn

from lockstep import Generates, Loss, Recipe, Rng
from lockstep.recipes.vision.recipe import VisionRecipe

INJECTOR = install()


def _poisoned(loss: Loss, model: nn.Module) -> Loss:
    """Return the loss of a batch, which is not a number where the plan says so."""
    if INJECTOR is not None and INJECTOR.nan_pending and model.training:
        INJECTOR.nan_pending = False
        loss.total = loss.total * float("nan")
    return loss


class Curve(Recipe, Generates):
    """Fit a curve with dropout and BatchNorm: generators and buffers count too."""

    name = "curve"
    defaults = {"batch_size": 8, "lr": 1e-2, "tensorboard": False, "curves": False}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 2))

    def dataset(self, split: str) -> list[Tensor]:
        size = 331 if split == "train" else 64
        return list(torch.randn(size, 4, generator=torch.Generator().manual_seed(size)))

    def loss(self, model: nn.Module, batch: Tensor, rng: Rng) -> Loss:
        target = torch.stack([batch.prod(1), batch.sum(1).sin()], 1)
        error = (model(batch) - target + 0.01 * rng.normal("noise", 2)).square()
        return _poisoned(Loss(error.sum(), error.numel()), model)

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        return {"few": {"n": 6}}

    def sample(self, model: nn.Module, index: Tensor, rng: Rng, **settings: Any) -> Tensor:
        return model(rng.normal("start", 4))

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        file = path.with_name(f"{path.name}.txt")
        file.write_text(str(samples.tolist()))
        return [file]


class Vision(VisionRecipe):
    """Image classification on drawn shapes."""

    def loss(self, model: nn.Module, batch: Any, rng: Rng) -> Loss:
        return _poisoned(super().loss(model, batch, rng), model)
