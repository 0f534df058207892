"""Tensors that are on some ranks only, whole on rank 0."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import World


@torch.no_grad()
def gather_tensors(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return, on rank 0, the tensors of all ranks by name, in host memory where they come from another rank.

    A name that several ranks have is taken from the first. On other ranks the result is empty. Every rank calls this.
    """
    ranks = world.broadcast(world.gather({name: _described(tensor) for name, tensor in tensors.items()}))
    found = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        source = next(rank for rank, names in enumerate(ranks) if name in names)
        tensor = _on_rank_0(tensors.get(name), source, ranks[source][name], world)
        if tensor is not None:
            found[name] = tensor
    return found


def _described(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    return tuple(tensor.shape), tensor.dtype, tensor.is_cpu


def _on_rank_0(tensor: Tensor | None, source: int, described: Any, world: World) -> Tensor | None:
    """Return, on rank 0, what rank `source` has as `tensor`; None elsewhere."""
    if source == 0:
        return tensor if world.is_main else None
    shape, dtype, on_host = described
    group = world.cpu_group if on_host else None  # NCCL takes no tensor of the host
    if world.rank == source:
        assert tensor is not None
        dist.send(tensor.contiguous(), 0, group=group)
    elif world.is_main:
        received = torch.empty(shape, dtype=dtype, device="cpu" if on_host else world.device)
        dist.recv(received, source, group=group)
        return received.cpu()
    return None
