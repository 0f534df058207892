"""Recipes small enough to train in a blink, for the engine's tests."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Augments, Generates, Loss, Recipe, Rng, Scores, SeveralTerms


@cache
def _points(size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All points at once, once in a process: drawn one by one they would take longer than the training."""
    number = torch.arange(size)
    rng = Rng.of(77, torch.zeros_like(number), number)
    x = rng.normal("x", 6, dtype=dtype)
    y = torch.stack([x[:, :3].sum(1), x[:, 3:].prod(1), x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
    known = torch.stack([rng.bernoulli("known", 0.1 + 0.8 * k / 7, 4) for k in range(7)])
    return {"x": x, "y": y, "known": known[number % 7, number]}


class Points:
    """Point i of a noisy curve: drawn from i alone."""

    def __init__(self, size: int = 997, labelled: bool = False):
        self.size, self.labelled = size, labelled
        self.points = {dtype: _points(size, dtype) for dtype in (torch.float32, torch.float64)}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: values[i] for name, values in self.points[torch.get_default_dtype()].items()}


@dataclass
class Options:
    """The tiny one's flags."""

    width: int = 16
    """Hidden units."""
    size: int = 997
    """Training points."""
    poison_from: int = -1
    """From this call of loss on, the loss is not a number (-1: never)."""
    poison_to: int = 1 << 60
    """Up to, but without, this call."""


class Tiny(Recipe):
    """Fit a curve with a small network."""

    name = "tiny"
    Options = Options
    defaults = {
        "n_steps": 20, "batch_size": 8, "lr": 1e-2, "log_every": 5, "save_every": 0, "tensorboard": False,
        "curves": False,
    }  # fmt: skip
    presets = {"short": {"n_steps": 3}}

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.calls = 0

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def dataset(self, split: str) -> Points:
        return Points(self.options.size if split == "train" else 101)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        noise = 0.01 * rng.normal("noise", 4, dtype=batch["y"].dtype)
        error = (model(batch["x"]) - batch["y"] - noise).square()
        total = error.sum()
        if model.training:
            if self.options.poison_from <= self.calls < self.options.poison_to and self.options.poison_from >= 0:
                total = total * float("nan")
            self.calls += 1
        return Loss(total, error.numel(), absolute=error.sqrt().sum().detach())


class Labelled(Tiny):
    """The same with labels missing here and there: the weight depends on the data."""

    name = "labelled"

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        error = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
        return Loss((error * batch["known"]).sum(), batch["known"].sum())


class WithDropout(Tiny):
    """With dropout, whose randomness is the rank's own."""

    name = "dropout"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))


class Plain(Tiny):
    """The mean squared error and nothing else: what a hand-written loop would have."""

    name = "plain"

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        error = (model(batch["x"]) - batch["y"]).square()
        return Loss(error.sum(), error.numel())


class Block(nn.Module):
    """What repeats in a deep network."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        hidden = 2 * width + width % 2
        self.rise, self.fall = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fall(F.gelu(self.rise(self.norm(x)))))


class Residual(nn.Module):
    """Some blocks in a row, and a buffer that is not saved."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.rise, self.fall = nn.Linear(6, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))
        self.register_buffer("waves", torch.linspace(0, 3, width).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rise(x) + self.waves
        for block in self.blocks:
            x = block(x)
        return self.fall(x)


class Deep(Labelled):
    """With blocks, of an odd width, that may be sharded and recomputed."""

    name = "deep"
    width, dropout = 11, 0.0

    def model(self) -> nn.Module:
        return Residual(self.width, self.dropout)


class DeepWithDropout(Deep):
    """With dropout in its blocks, and rows of parameters that begin where a vector of a kernel begins."""

    name = "deepdropout"
    width, dropout = 64, 0.3


class WithBatchNorm(Plain):
    """With BatchNorm, whose statistics should be those of the global batch."""

    name = "batchnorm"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


class Terms(Tiny, SeveralTerms):
    """Two terms, each a mean over elements of its own."""

    name = "terms"

    def term_counts(self, batch: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        return {"known": batch["known"].sum(), "drawn": rng.bernoulli("drawn", 0.3, 4).sum()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        error = (model(batch["x"]) - batch["y"]).square()
        drawn = rng.bernoulli("drawn", 0.3, 4)
        return Loss.of_terms(known=(error * batch["known"]).sum(), drawn=0.5 * (error.sqrt() * drawn).sum())


class Uneven(Labelled):
    """Samples that cost more than others, shared out by that."""

    name = "uneven"

    def sample_costs(self, dataset: Points) -> list[float]:
        return [float(i * 7919 % 31) for i in range(len(dataset))]


class Augmented(Labelled, Augments):
    """Items changed at random in the loader."""

    name = "augmented"

    def augment(self, item: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        return {**item, "x": item["x"] + 0.01 * rng.normal("shift", 6, dtype=item["x"].dtype)[0]}


class Generating(Plain, Generates, Scores):
    """Two sets of samples, and a score of samples every 4 steps."""

    name = "generating"
    score_every = 4

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        return {"few": {"n": 3}, "many": {"n": 5, "shift": 1.0}}

    def sample(self, model: nn.Module, index: Tensor, rng: Rng, shift: float = 0.0, **settings: Any) -> Tensor:
        self.calls += 1
        return model(rng.normal("start", 6)) + shift

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        files = [path.with_name(f"{path.name}{suffix}") for suffix in (".txt", ".more")]
        for file in files:
            file.write_text(str(samples.tolist()))
        return files

    def score(self, model: nn.Module, sum_over_ranks: Any, folder: Path) -> tuple[dict[str, float], str | None]:
        self.calls += 1
        sums = sum_over_ranks(10, 4, lambda numbers, rng: {"mean": model(rng.normal("start", 6)).sum()})
        return {"quality": float(sums["mean"])}, "a note of the score"
