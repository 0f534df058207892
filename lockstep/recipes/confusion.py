"""Confusion matrices, which add up exactly over batches and ranks, and the metrics that follow from them.

A confusion matrix (K, K) holds at [t, p] how many samples (or pixels) of class t were predicted as class p.
"""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = 255
"""The label of pixels that have none."""


def confusion_matrix(prediction: Tensor, truth: Tensor, classes: int) -> Tensor:
    """(K, K) int64 from tensors of one shape; a `truth` outside of 0 … K-1 is left out."""
    prediction, truth = prediction.flatten(), truth.flatten().long()
    known = (truth >= 0) & (truth < classes)
    cell = torch.where(known, truth * classes + prediction, classes * classes)
    counts = torch.zeros(classes * classes + 1, dtype=torch.int64, device=truth.device)
    return counts.index_add_(0, cell, torch.ones_like(cell))[:-1].view(classes, classes)


class PerClass(NamedTuple):
    """Each (K,) float64; nan for a class that neither occurs nor is predicted."""

    precision: Tensor
    recall: Tensor
    f1: Tensor
    iou: Tensor


def per_class(matrix: Tensor) -> PerClass:
    hits = matrix.diagonal().double()
    truth, predicted = matrix.sum(1).double(), matrix.sum(0).double()
    both = truth + predicted

    def ratio(part: Tensor, whole: Tensor) -> Tensor:
        return torch.where(both > 0, part / whole.clamp(min=1), torch.nan)

    return PerClass(ratio(hits, predicted), ratio(hits, truth), ratio(2 * hits, both), ratio(hits, both - hits))


def accuracy(matrix: Tensor) -> float:
    return int(matrix.trace()) / max(1, int(matrix.sum()))


def class_mean(values: Tensor) -> float:
    """Return the mean over the classes that occur or are predicted."""
    return float(values.nanmean())
