"""Lockstep trains PyTorch models on one GPU or on many, and proves that nothing went silently wrong."""

from .cli import train
from .config import TrainConfig
from .recipe import Loss, Recipe
from .rng import Rng
from .trainer import Trainer

__all__ = ["Loss", "Recipe", "Rng", "TrainConfig", "Trainer", "train"]
__version__ = "0.1.0"
