"""Lockstep trains PyTorch models on one GPU or on many, and proves that nothing went silently wrong."""

from collections.abc import Sequence

from .api import fit
from .config import TrainConfig
from .loss import Loss
from .outcome import Outcome
from .recipe import (
    Augments,
    Describes,
    EmbedsData,
    Evaluates,
    Generates,
    Pictures,
    Predicts,
    Pretrained,
    Recipe,
    Scores,
    SeveralTerms,
    Tests,
)
from .rng import Rng
from .trainer import Trainer

__all__ = [
    "Augments",
    "Describes",
    "EmbedsData",
    "Evaluates",
    "Generates",
    "Loss",
    "Outcome",
    "Pictures",
    "Predicts",
    "Pretrained",
    "Recipe",
    "Rng",
    "Scores",
    "SeveralTerms",
    "Tests",
    "TrainConfig",
    "Trainer",
    "fit",
    "train",
]
__version__ = "0.1.0"


def train(recipe: type[Recipe], argv: Sequence[str] | None = None) -> None:
    """`lockstep train` from a script of your own: `train(MyRecipe)` under `if __name__ == "__main__"`. Exits."""
    from .cli import train as train_and_exit  # a library does not need the command line

    train_and_exit(recipe, argv)
