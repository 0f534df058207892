"""A small GAN with two optimizers that take turns, and a recipe whose branches take part only in some steps."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tiny import Tiny
from torch import Tensor, nn

from lockstep import Alternates, Loss, Rng


@dataclass
class Options:
    """Flags of the GAN."""

    size: int = 101
    """Training points."""
    in_a_row: int = 2
    """Steps with the same batch."""
    batch_norm: bool = False
    """Whether the discriminator has BatchNorm."""
    dropout: float = 0.0
    """Share of the discriminator's hidden units that are dropped."""
    spike_at: int = -1
    """The step in which the loss is not a number."""


class Gan(Tiny, Alternates):
    """Points, and a network that learns to make them; the discriminator makes two steps of three."""

    name = "gan"
    Options = Options
    defaults = {**Tiny.defaults, "batch_size": 4, "global_batch_size": 14, "log_every": 1}

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.steps_per_batch = self.options.in_a_row

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self.options.batch_norm else nn.Identity()
        discriminator = nn.Sequential(
            nn.Linear(6, 8), norm, nn.SiLU(), nn.Dropout(self.options.dropout), nn.Linear(8, 1)
        )
        return nn.ModuleDict({"g": nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 6)), "d": discriminator})

    def optimizers(self, model: Any) -> dict[str, torch.optim.Optimizer]:
        return {
            "d": torch.optim.AdamW(model["d"].parameters(), self.optim.lr),
            "g": torch.optim.SGD(model["g"].parameters(), 2 * self.optim.lr, momentum=0.5),
        }

    def turn_of(self, step: int) -> str:
        return "g" if step % 3 == 2 else "d"

    def loss(self, model: Any, batch: dict[str, Tensor], rng: Rng) -> Loss:
        real = batch["x"]
        fake = model["g"](rng.normal("z", 3, dtype=real.dtype))
        if model.training and self.options.spike_at == int(self.step):
            fake = fake * float("nan")
        if self.turn == "g":
            return Loss(F.softplus(-model["d"](fake)).sum(), len(real))
        scores = model["d"](torch.cat([real, fake])).squeeze(1)
        right = torch.cat([scores[: len(real)], -scores[len(real) :]])
        return Loss(F.softplus(-right).sum(), 2 * len(real), accuracy=(right > 0).sum())


class Branches(Tiny):
    """Two branches, of which a step uses one, and a layer that none uses."""

    name = "branches"

    def model(self) -> nn.Module:
        names = ("even", "odd", "never")
        return nn.ModuleDict({"first": nn.Linear(6, 8), **{name: nn.Linear(8, 4) for name in names}})

    def loss(self, model: Any, batch: dict[str, Tensor], rng: Rng) -> Loss:
        branch = model["odd" if int(self.step) % 2 else "even"]
        error = (branch(torch.tanh(model["first"](batch["x"]))) - batch["y"]).square()
        return Loss(error.sum(), error.numel())
