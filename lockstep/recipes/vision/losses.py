"""Segmentation losses of single images."""

import torch
from torch import Tensor

from ..confusion import IGNORE

_SMOOTH = 1.0


def soft_dice(probability: Tensor, mask: Tensor) -> Tensor:
    """(n,): one minus the Dice overlap of each image, mean over the classes that its mask holds.

    probability (n, K, S, S), mask (n, S, S); pixels without a label are left out. A class that the mask does not hold
    has no term of its own: it would stay near 1 and hide those that change. Its pixels still lower the others' overlap.
    """
    classes = torch.arange(probability.shape[1], device=mask.device)[:, None, None]
    known = (mask != IGNORE)[:, None]
    truth = (mask[:, None] == classes) & known
    probability = probability * known
    overlap = (probability * truth).sum((2, 3))
    pixels = truth.sum((2, 3))
    loss = 1 - (2 * overlap + _SMOOTH) / (probability.sum((2, 3)) + pixels + _SMOOTH)
    present = pixels > 0
    return (loss * present).sum(1) / present.sum(1).clamp(min=1)
