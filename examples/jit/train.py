"""Pixel diffusion with just an image transformer: python train.py, torchrun ... train.py, or train_multi_gpu.sh N."""

from lockstep import train
from lockstep.recipes.jit import JiTRecipe

if __name__ == "__main__":
    train(JiTRecipe)
