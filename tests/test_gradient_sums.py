"""Sums of gradients of any parameters: what a rank without anything to add does."""

import torch
from torch import nn

from lockstep.distributed import World
from lockstep.gradient_sums import GradientSums


def test_a_loss_of_nothing_adds_nothing() -> None:
    """A rank that has no sample of a kind passes a total of 0, which needs no gradient."""
    weight = nn.Parameter(torch.ones(3))
    sums = GradientSums([weight], World())
    sums.backward(torch.zeros(()))
    assert weight.grad is None
    sums.backward((2 * weight).sum())
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0, 2.0]
