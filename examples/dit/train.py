"""Diffusion transformer with register tokens: python train.py, torchrun ... train.py, or run_ddp.sh."""

from lockstep import train
from lockstep.recipes.dit import DiTRecipe

if __name__ == "__main__":
    train(DiTRecipe)
