"""Lockstep trains PyTorch models on one GPU or on many, and proves that nothing went silently wrong."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import fit, world
    from .config import TrainConfig
    from .distributed import RunFailed, World
    from .loop import Run
    from .loss import Loss
    from .outcome import NotSaved, Outcome, Stopped
    from .recipe import (
        AfterStep,
        Alternates,
        Augments,
        Describes,
        EmbedsData,
        Evaluates,
        Generates,
        Pictures,
        Predicts,
        Pretrained,
        Recipe,
        Schedules,
        Scores,
        SeveralTerms,
        Tests,
    )
    from .rng import Rng
    from .stream import Stream
    from .tar_shards import TarShards
    from .trainer import Trainer
    from .watch import OutOfLockstep

__all__ = [
    "AfterStep",
    "Alternates",
    "Augments",
    "Describes",
    "EmbedsData",
    "Evaluates",
    "Generates",
    "Loss",
    "NotSaved",
    "OutOfLockstep",
    "Outcome",
    "Pictures",
    "Predicts",
    "Pretrained",
    "Recipe",
    "Rng",
    "Run",
    "RunFailed",
    "Schedules",
    "Scores",
    "SeveralTerms",
    "Stopped",
    "Stream",
    "TarShards",
    "Tests",
    "TrainConfig",
    "Trainer",
    "World",
    "fit",
    "train",
    "world",
]
__version__ = "0.1.0"
_MODULES = {
    "api": ("fit", "world"),
    "config": ("TrainConfig",),
    "distributed": ("RunFailed", "World"),
    "loop": ("Run",),
    "loss": ("Loss",),
    "outcome": ("NotSaved", "Outcome", "Stopped"),
    "rng": ("Rng",),
    "stream": ("Stream",),
    "tar_shards": ("TarShards",),
    "trainer": ("Trainer",),
    "watch": ("OutOfLockstep",),
}
"""Where public names are, if not in `recipe`. They are imported when they are first used: --help needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "recipe")
    globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def train(recipe: "type[Recipe]", argv: Sequence[str] | None = None) -> None:
    """`lockstep train` from a script of your own: `train(MyRecipe)` under `if __name__ == "__main__"`. Exits."""
    from .cli import train as train_and_exit  # a library does not need the command line

    train_and_exit(recipe, argv)
