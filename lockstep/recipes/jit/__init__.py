"""Pixel diffusion by plain transformers on large patches that predict the image itself."""

from .recipe import JiTRecipe

__all__ = ["JiTRecipe"]
