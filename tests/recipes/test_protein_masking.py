"""What is hidden from the decoder: how much, where, and that company changes nothing."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lockstep.recipes.protein.chemistry import END, MASK, PAD, SPECIAL, slot_table
from lockstep.recipes.protein.masking import Masking, mask_all, mask_slots
from lockstep.rng import Rng

N, LENGTH = 200, 60


def chains() -> tuple[Tensor, Tensor]:
    index = torch.arange(N)
    rng = Rng.of(1, index * 0, index)
    residue = rng.integers("residue", 21, LENGTH)
    real = torch.arange(LENGTH) < (20 + rng.integers("length", LENGTH - 19))[:, None]
    return slot_table()[torch.where(real, residue, 20)], real


def rng(count: int = N, seed: int = 7) -> Rng:
    index = torch.arange(count)
    return Rng.of(seed, index * 0, index)


@pytest.mark.parametrize("strategy", ["random", "block"])
@pytest.mark.parametrize("ratio", [0.15, 0.5])
def test_the_ratio_is_that_of_the_fragments_and_special_tokens_stay(strategy: str, ratio: float) -> None:
    slots, real = chains()
    shown, asked = mask_slots(slots, real, rng(), Masking(strategy, ratio), 128)
    fragments = int((slots >= SPECIAL).sum())
    spread = (ratio * (1 - ratio) / fragments * (8 if strategy == "block" else 1)) ** 0.5
    assert int(asked.sum()) / fragments == pytest.approx(ratio, abs=4 * spread)
    assert (slots[asked] >= SPECIAL).all()
    assert (shown[asked] == MASK).all() and torch.equal(shown[~asked], slots[~asked])
    assert set(slots[~asked].unique().tolist()) >= {PAD, END} and (slots[asked].unique().numel()) == 12


def test_blocks_are_contiguous() -> None:
    slots, real = chains()
    _, asked = mask_slots(slots, real, rng(), Masking("block", 0.3, block=6), 128)
    lengths = []
    for row, mask in zip(slots, asked, strict=True):
        line = mask[row >= SPECIAL].tolist()  # the fragments of the chain in a row
        borders = [i for i in range(1, len(line)) if line[i] != line[i - 1]]
        # Between the first and the last border all runs are whole blocks, hidden or shown.
        lengths += [b - a for a, b in pairwise(borders)]
    assert lengths and all(length % 6 == 0 for length in lengths)
    _, alone = mask_slots(slots, real, rng(), Masking("random", 0.3), 128)
    assert not torch.equal(alone, asked)


@pytest.mark.parametrize("strategy", ["random", "block"])
def test_what_is_hidden_does_not_depend_on_company_or_padding(strategy: str) -> None:
    slots, real = chains()
    masking = Masking(strategy, 0.3, backbone_only=0.2)
    whole = mask_slots(slots, real, rng(), masking, 128)
    for i in (0, 3, 77):
        size = int(real[i].sum())
        own = Rng(rng().keys[i : i + 1])
        alone = mask_slots(slots[i : i + 1, :size], real[i : i + 1, :size], own, masking, 128)
        for one, other in zip(alone, whole, strict=True):
            assert torch.equal(one[0], other[i, :size])


def test_a_bare_sample_shows_nothing_and_asks_for_everything() -> None:
    slots, real = chains()
    shown, asked = mask_slots(slots, real, rng(), Masking("random", 0.15, backbone_only=0.25), 128)
    bare = (asked == (slots != PAD)).all((1, 2))
    assert 0.13 < bare.double().mean() < 0.38
    nothing = mask_all(slots, real)
    assert torch.equal(shown[bare], nothing.tokens[bare]) and torch.equal(asked[bare], nothing.loss_mask[bare])
    assert (nothing.tokens[real] == MASK).all() and (nothing.tokens[~real] == PAD).all()
    assert (slots[nothing.loss_mask] != PAD).all() and (slots[nothing.loss_mask] == END).any()
