"""Scribble-supervised semantic segmentation."""

from .recipe import ScribbleRecipe

__all__ = ["ScribbleRecipe"]
