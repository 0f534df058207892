"""One protein chain as tensors; cropping, and padding to a batch."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUND = 16
"""Batches are padded to multiples of it, so that torch.compile sees few shapes."""

ITEM = ("residue", "backbone", "present", "linked", "chi", "has_chi")
"""The tensors of a chain that make an item of a data set."""


@dataclass
class Chain:
    """L residues in order."""

    name: str
    residue: Tensor
    """(L,) int64: which of the twenty, or UNKNOWN."""
    backbone: Tensor
    """(L, 4, 3): N, CA, C, O in Å; 0 where an atom is missing. CA is never missing."""
    present: Tensor
    """(L, 4) bool: which of them the file has."""
    linked: Tensor
    """(L,) bool: whether a peptide bond joins the residue to the previous one."""
    chi: Tensor
    """(L, 4) side-chain torsions in degrees."""
    has_chi: Tensor
    """(L, 4) bool: which of them could be measured."""
    numbers: list[str] = field(default_factory=list)
    """Of each residue its number in the file, with the insertion code: 52, 52A."""
    sides: Tensor | None = None
    """(L, 10, 3): the side-chain atoms, of chains that were built."""

    def __len__(self) -> int:
        return len(self.residue)

    def item(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ITEM}


def crop(item: dict[str, Tensor], start: int, length: int) -> dict[str, Tensor]:
    """Return `length` residues from `start` on; the first is not linked."""
    part = {name: tensor[start : start + length] for name, tensor in item.items()}
    part["linked"] = part["linked"] & (torch.arange(len(part["linked"])) > 0)
    return part


def pad(items: list[dict[str, Tensor]], unknown: int) -> dict[str, Tensor]:
    """Return a batch (n, L, ...); padding has no CA."""
    longest = max(len(item["residue"]) for item in items)
    length = -(-longest // ROUND) * ROUND
    batch = {}
    for name, first in items[0].items():
        padded = first.new_full((len(items), length, *first.shape[1:]), unknown if name == "residue" else 0)
        for row, item in zip(padded, items, strict=True):
            row[: len(item[name])] = item[name]
        batch[name] = padded
    return batch
