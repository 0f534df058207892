"""Masked fragment modelling of protein side chains."""

from .recipe import ProteinRecipe

__all__ = ["ProteinRecipe"]
