"""Masked fragment modelling of protein side chains: python train.py, or torchrun ... train.py."""

from lockstep import train
from lockstep.recipes.protein import ProteinRecipe

if __name__ == "__main__":
    train(ProteinRecipe)
