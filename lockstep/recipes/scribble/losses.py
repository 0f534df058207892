"""The terms of the loss as sums over pixels, and the confusion matrix.

Legend: log_p (N, K, H, W) log-probabilities; label (N, H, W), 255 where there is none; near (N, H, W), 0 to 255.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import IGNORE


def labelled(label: Tensor) -> Tensor:
    return label != IGNORE


def cross_entropy(log_p: Tensor, label: Tensor, smoothing: float = 0.0) -> Tensor:
    """Over the labelled pixels; a part `smoothing` of each label is spread evenly over all classes."""
    total = F.nll_loss(log_p, label, ignore_index=IGNORE, reduction="sum")
    if not smoothing:
        return total
    # where, not a product: a score of −inf at a pixel without a label must not become a nan.
    spread = torch.where(labelled(label), -log_p.mean(1), 0.0).sum()
    return (1 - smoothing) * total + smoothing * spread


def entropy_near(log_p: Tensor, near: Tensor) -> Tensor:
    """The entropy of the prediction, weighted by nearness: be sure where something is known close by."""
    entropy = -(log_p.exp() * log_p).sum(1)
    return (entropy * (near.to(log_p.dtype) / 255)).sum()


def confusion(label: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """(K, K) int64: how many pixels of each class (row) were given each label (column)."""
    known = labelled(label)
    pairs = label[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def ious(matrix: Tensor) -> Tensor:
    """(K,) float64: intersection over union; not a number for a class that is neither there nor predicted."""
    both = matrix.diagonal().double()
    return both / (matrix.sum(0) + matrix.sum(1) - both)
