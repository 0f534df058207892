"""Sums over images that add up exactly, and what follows from them.

A confusion matrix (K, K) holds at [t, p] how many samples (or pixels) of class t were taken for class p.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NO_LABEL = 255
"""A pixel of a mask that has no label."""
_SMOOTH = 1.0


def soft_dice(probability: Tensor, mask: Tensor) -> Tensor:
    """(n,): one minus the Dice overlap of each image, mean over the classes that its mask holds.

    probability (n, K, S, S), mask (n, S, S); pixels without a label are left out. Classes that are not there are left
    to the others, from which they take: their own terms would be near 1 and hardly move, and hide those that do.
    """
    classes = torch.arange(probability.shape[1], device=mask.device)[:, None, None]
    known = (mask != NO_LABEL)[:, None]
    truth = (mask[:, None] == classes) & known
    probability = probability * known
    overlap = (probability * truth).sum((2, 3))
    pixels = truth.sum((2, 3))
    loss = 1 - (2 * overlap + _SMOOTH) / (probability.sum((2, 3)) + pixels + _SMOOTH)
    present = pixels > 0
    return (loss * present).sum(1) / present.sum(1).clamp(min=1)


def confusion(prediction: Tensor, truth: Tensor, classes: int) -> Tensor:
    """(K, K) int64, of tensors of any shape; what has no label is left out."""
    prediction, truth = prediction.flatten(), truth.flatten().long()
    known = (truth >= 0) & (truth < classes)
    place = torch.where(known, truth * classes + prediction, classes * classes)
    counts = torch.zeros(classes * classes + 1, dtype=torch.int64, device=truth.device)
    return counts.index_add_(0, place, torch.ones_like(place))[:-1].view(classes, classes)


class ByClass(NamedTuple):
    """Each (K,) float64; not a number for a class that neither occurs nor is predicted."""

    precision: Tensor
    recall: Tensor
    f1: Tensor
    iou: Tensor


def by_class(matrix: Tensor) -> ByClass:
    right = matrix.diagonal().double()
    truth, predicted = matrix.sum(1).double(), matrix.sum(0).double()
    occurs = truth + predicted > 0

    def ratio(part: Tensor, whole: Tensor) -> Tensor:
        return torch.where(occurs, part / whole.clamp(min=1), torch.nan)

    either = truth + predicted
    return ByClass(ratio(right, predicted), ratio(right, truth), ratio(2 * right, either), ratio(right, either - right))


def accuracy(matrix: Tensor) -> float:
    return float(matrix.diagonal().sum() / matrix.sum().clamp(min=1))


def mean(values: Tensor) -> float:
    """Over the classes that occur."""
    return float(values.nanmean())
