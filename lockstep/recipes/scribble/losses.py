"""The terms of the loss as sums over pixels.

Legend: log_p (N, K, H, W) log-probabilities; label (N, H, W), 255 where there is none; near (N, H, W), 0 to 255.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..confusion import IGNORE


def labelled(label: Tensor) -> Tensor:
    return label != IGNORE


def cross_entropy(log_p: Tensor, label: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum over the labelled pixels; a fraction `smoothing` of each label is spread evenly over all classes."""
    total = F.nll_loss(log_p, label, ignore_index=IGNORE, reduction="sum")
    if not smoothing:
        return total
    # where, not a product: a score of −inf at a pixel without a label must not become a nan.
    spread = torch.where(labelled(label), -log_p.mean(1), 0.0).sum()
    return (1 - smoothing) * total + smoothing * spread


def entropy_near(log_p: Tensor, near: Tensor) -> Tensor:
    """Sum of the prediction's entropy weighted by nearness: predictions are to be certain near a label."""
    entropy = -(log_p.exp() * log_p).sum(1)
    return (entropy * (near.to(log_p.dtype) / 255)).sum()
