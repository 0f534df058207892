"""Which side-chain tokens are hidden from the decoder, and which it is asked for.

    hidden = hide(slots, residues, rng, Masking("random", 0.15), draws=512)
    hidden.shown, hidden.asked                   # (n, L, 5): what the decoder sees; where it has to answer

Masking hides fragments here and there, alone or in blocks along the chain; pad, begin and end are never masked. `end`
then tells how long a side chain is. So in some samples the whole of it is hidden: the decoder gets nothing but the
backbone, five masks a residue, and is asked for every fragment and for where each side chain ends. Prediction from a
bare backbone is learnt there, and only there.

All draws are for `draws` residues, however long the batch: what is drawn for a chain does not depend on its company.
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
    """Fragments of a block."""
    bare: float = 0.0
    """Share of samples in which all is hidden."""


class Hidden(NamedTuple):
    shown: Tensor
    asked: Tensor


def hide(slots: Tensor, residues: Tensor, rng: Rng, masking: Masking, draws: int) -> Hidden:
    """slots (n, L, 5) tokens, residues (n, L) bool: which are more than padding."""
    draws = max(draws, slots.shape[1])
    chosen = (in_blocks if masking.strategy == "block" else at_random)(slots, rng, masking, draws)
    masked = Hidden(torch.where(chosen, MASK, slots), chosen)
    if not masking.bare:
        return masked
    bare, everything = rng.bernoulli("bare", masking.bare)[:, None, None], hide_all(slots, residues)
    return Hidden(torch.where(bare, everything.shown, masked.shown), torch.where(bare, everything.asked, masked.asked))


def hide_all(slots: Tensor, residues: Tensor) -> Hidden:
    """Only the backbone is left."""
    return Hidden(torch.where(residues[..., None], MASK, PAD).expand_as(slots), slots != PAD)


def at_random(slots: Tensor, rng: Rng, masking: Masking, draws: int) -> Tensor:
    return rng.bernoulli("mask", masking.ratio, draws, SLOTS)[:, : slots.shape[1]] & (slots >= SPECIAL)


def in_blocks(slots: Tensor, rng: Rng, masking: Masking, draws: int) -> Tensor:
    """The chain's fragments in a row, cut into blocks from a random place on; each block is masked or not."""
    fragment = (slots >= SPECIAL).flatten(1)
    place = fragment.cumsum(1) - 1 + rng.integers("shift", masking.block)[:, None]
    block = place.clamp(min=0) // masking.block
    taken = rng.bernoulli("block", masking.ratio, draws * SLOTS // masking.block + 2)
    return (taken.gather(1, block) & fragment).view_as(slots)
