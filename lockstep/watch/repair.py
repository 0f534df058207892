"""Tensors of a rank that are not those of the others are copied from a rank that has what most have."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import World
from .agreement import minority


def find_sources(ranks: Sequence[Mapping[str, int]]) -> dict[str, int] | None:
    """Return, for each tensor whose checksums differ, a rank to copy it from; None if one has no majority."""
    found = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [rank.get(name) for rank in ranks]
        if len(set(values)) == 1:
            continue
        wrong = minority(values)
        if not wrong or any(value is None for value in values):
            return None
        found[name] = next(rank for rank in range(len(values)) if rank not in wrong)
    return found


def affects_training(names: Iterable[str]) -> bool:
    """Return whether steps made with wrong values of these tensors are wrong too; averages are only written."""
    return any(not name.startswith("ema-") for name in names)


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, Tensor], sources: Mapping[str, int], world: World) -> None:
    """Copy each tensor in `sources` from that rank to all others, in place. Every rank calls this."""
    for name, rank in sources.items():
        sent = tensors[name].contiguous()
        # NCCL takes no tensor of the host, where optimizers keep their step counters.
        dist.broadcast(sent, rank, group=world.cpu_group if sent.is_cpu else None)
        tensors[name].copy_(sent)
