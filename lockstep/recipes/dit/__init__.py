"""Diffusion transformers with register tokens, trained by rectified flow."""

from .recipe import DiTRecipe

__all__ = ["DiTRecipe"]
