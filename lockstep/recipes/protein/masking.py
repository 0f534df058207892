"""Which side-chain tokens are masked, and where the loss is computed.

    masked = mask_slots(slots, residues, rng, Masking("random", 0.15), draws=512)
    masked.tokens, masked.loss_mask              # (n, L, 5): the decoder's input; which tokens it has to predict

Fragments are masked one by one or in blocks along the chain; pad, begin and end never are. `end` then gives away the
length of a side chain. So in some samples all slots are masked: the decoder sees only the backbone and predicts every
fragment and every `end`. Prediction from a backbone alone is learnt from these samples, and only from them.

All random numbers are drawn for `draws` residues, however long the batch is: what is drawn for a chain does not depend
on the other chains of the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...rng import Rng
from .chemistry import MASK, PAD, SLOTS, SPECIAL


class Masking(NamedTuple):
    strategy: str
    ratio: float
    block: int = 8
    """Fragments per block."""
    backbone_only: float = 0.0
    """Fraction of samples in which all slots are masked."""


class Masked(NamedTuple):
    tokens: Tensor
    loss_mask: Tensor


def mask_slots(slots: Tensor, residues: Tensor, rng: Rng, masking: Masking, draws: int) -> Masked:
    """Mask tokens (n, L, 5); residues (n, L) is False for padding."""
    draws = max(draws, slots.shape[1])
    chosen = (in_blocks if masking.strategy == "block" else at_random)(slots, rng, masking, draws)
    some = Masked(torch.where(chosen, MASK, slots), chosen)
    if not masking.backbone_only:
        return some
    bare, every = rng.bernoulli("bare", masking.backbone_only)[:, None, None], mask_all(slots, residues)
    return Masked(*(torch.where(bare, b, a) for a, b in zip(some, every, strict=True)))


def mask_all(slots: Tensor, residues: Tensor) -> Masked:
    """Mask every slot: only the backbone is left."""
    return Masked(torch.where(residues[..., None], MASK, PAD).expand_as(slots), slots != PAD)


def at_random(slots: Tensor, rng: Rng, masking: Masking, draws: int) -> Tensor:
    return rng.bernoulli("mask", masking.ratio, draws, SLOTS)[:, : slots.shape[1]] & (slots >= SPECIAL)


def in_blocks(slots: Tensor, rng: Rng, masking: Masking, draws: int) -> Tensor:
    """The fragments of a chain in order, cut into blocks with a random offset; each block is masked or not."""
    fragment = (slots >= SPECIAL).flatten(1)
    position = fragment.cumsum(1) - 1 + rng.integers("shift", masking.block)[:, None]
    block = position.clamp(min=0) // masking.block
    masked = rng.bernoulli("block", masking.ratio, draws * SLOTS // masking.block + 2)
    return (masked.gather(1, block) & fragment).view_as(slots)
