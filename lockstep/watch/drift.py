"""Replicas hold the same weights, to the bit: compared by a checksum of every tensor."""

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits, read as integers: one pass over the weights, one wait for the device."""
    sums = [t.view(_INTEGER[t.element_size()]).sum(dtype=torch.int64) for t in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def differing(ranks: list[dict[str, int]]) -> tuple[str, int, int] | None:
    """The first tensor that is not the same everywhere, how many there are, and the first rank that differs."""
    wrong = [name for name, value in ranks[0].items() if any(other[name] != value for other in ranks[1:])]
    if not wrong:
        return None
    name = wrong[0]
    return name, len(wrong), next(r for r, other in enumerate(ranks) if other[name] != ranks[0][name])
