"""Image classification (ResNet, ViT) and segmentation (UNet)."""

from .recipe import VisionRecipe

__all__ = ["VisionRecipe"]
