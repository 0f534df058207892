"""Segmentation from scribbles: python train.py, torchrun ... train.py, train_torchrun.sh or train_ddp.sh."""

import sys

from lockstep import train
from lockstep.recipes.scribble import ScribbleRecipe

if __name__ == "__main__":
    # Flags typed later win, so --logdir still moves the events elsewhere.
    train(ScribbleRecipe, ["--logdir", "./log", *sys.argv[1:]])
