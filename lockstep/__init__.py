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
    from .trainer import Trainer
    from .watch import OutOfLockstep

__all__ = [
    "AfterStep",
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
    "Tests",
    "TrainConfig",
    "Trainer",
    "World",
    "fit",
    "train",
    "world",
]
__version__ = "0.1.0"
_MODULES = ("loop", "api", "config", "loss", "outcome", "recipe", "rng", "stream", "trainer", "watch")
"""Where the public names are, the first that has one: `Run` is that of `loop`, not that of `config`. They are imported
when they are first used: `lockstep --help` needs no torch."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (importlib.import_module(f".{module}", __name__) for module in _MODULES):
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def train(recipe: "type[Recipe]", argv: Sequence[str] | None = None) -> None:
    """`lockstep train` from a script of your own: `train(MyRecipe)` under `if __name__ == "__main__"`. Exits."""
    from .cli import train as train_and_exit  # a library does not need the command line

    train_and_exit(recipe, argv)
