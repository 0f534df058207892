"""What an evaluation counts: correct fragments, residues and torsions, as integers, which add up exactly."""

import torch
from torch import Tensor

from ...recipe import Sums
from .chemistry import PAD, RESIDUES, TOKENS, TORSIONS, slot_table
from .geometry import from_bins, wrapped

NEAR = 20.0
"""Degrees within which a torsion counts as correct."""
UNITS = 1000
"""Errors are added up in thousandths of a degree."""


def count_by(kind: Tensor, kinds: int, values: Tensor) -> Tensor:
    """(kinds,) int64: the sum of integer `values` by `kind`."""
    total = torch.zeros(kinds, dtype=torch.int64, device=kind.device)
    return total.index_add(0, kind.flatten(), values.to(torch.int64).flatten())


def fragment_counts(logits: Tensor, slots: Tensor, loss_mask: Tensor) -> Sums:
    """By token: how often it was predicted correctly, and how often it was to be predicted."""
    right = (logits.argmax(-1) == slots) & loss_mask
    return {
        "fragment hits": count_by(slots, len(TOKENS), right),
        "fragment count": count_by(slots, len(TOKENS), loss_mask),
    }


def torsion_counts(logits: Tensor, chi: Tensor, has_chi: Tensor, symmetric: Tensor) -> Sums:
    """By torsion, chi1 … chi4: the sum of errors, how many are correct, and how many there are."""
    error = torsion_error(from_bins(logits.softmax(-1), symmetric), chi, symmetric)
    thousandths = (error * UNITS).round().to(torch.int64) * has_chi
    number = torch.arange(TORSIONS, device=chi.device).expand_as(has_chi)
    return {
        "torsion error": count_by(number, TORSIONS, thousandths),
        "torsion hits": count_by(number, TORSIONS, (error <= NEAR) & has_chi),
        "torsion count": count_by(number, TORSIONS, has_chi),
    }


def torsion_error(predicted: Tensor, chi: Tensor, symmetric: Tensor) -> Tensor:
    """The difference of two angles in degrees, at most 180; for a symmetric torsion modulo half a turn."""
    return wrapped(predicted - chi, torch.where(symmetric, 180.0, 360.0).to(chi.dtype)).abs()


def residue_scores(logits: Tensor) -> Tensor:
    """(n, L, 5, 16) to (n, L, 20): log-probabilities of the residues, from those of the tokens in their slots."""
    table = slot_table()[: len(RESIDUES)].to(logits.device)  # (20, 5)
    held = logits.log_softmax(-1).unsqueeze(2).expand(-1, -1, len(RESIDUES), -1, -1)
    index = table.expand(*held.shape[:2], -1, -1)[..., None]
    each = held.gather(-1, index).squeeze(-1) * (table != PAD)
    return each.sum(-1).log_softmax(-1)


def fragment_values(sums: dict[str, Tensor], prefix: str = "") -> dict[str, float]:
    return {"fragment_accuracy": _ratio(sums[prefix + "fragment hits"], sums[prefix + "fragment count"])}


def torsion_values(sums: dict[str, Tensor], prefix: str = "") -> dict[str, float]:
    count = sums[prefix + "torsion count"]
    return {
        "torsion_error": _ratio(sums[prefix + "torsion error"], count) / UNITS,
        "torsion_within_20": _ratio(sums[prefix + "torsion hits"], count),
    }


def _ratio(hits: Tensor, count: Tensor) -> float:
    return int(hits.sum()) / max(1, int(count.sum()))
