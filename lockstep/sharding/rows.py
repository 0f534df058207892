"""Exact sums of gradients by rows: `--exact --shard full`.

FSDP2 hands over the gradients of a unit, tile by tile, to sum and scatter them. They are rounded onto the grid, summed
over the ranks as integers, and added to those of the tiles before; after the last tile the rows of the sum are floats
again. Integer addition has no rounding, so the bits are those of DDP's all-reduce (see exact.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ..distributed import RunFailed
from ..exact import ExactSums

_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since torch 2.13


class RowSums(ReduceScatter):
    """The reduce-scatter of one unit. The tensors that it is called with have its parameters side by side."""

    def __init__(self, parameters: Sequence[Tensor], sums: ExactSums, tiles: int):
        """`tiles`: those of each rank in a step."""
        self.sums, self.tiles, self.ranks = sums, tiles, sums.world.size
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sizes = [-(-len(p) // self.ranks) * (p.numel() // max(1, len(p))) for p in trained]
        numbers = torch.tensor([sums.number[parameter] for parameter in trained], dtype=torch.int64)
        self.number = numbers.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(sums.world.device)
        """Of each element of a rank's rows: the number of its parameter."""
        self.before: Tensor | None = None
        self.done = 0

    def start_step(self) -> None:
        self.before, self.done = None, 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write zeros, and with the last tile the integers of the sum as floats, into `output_tensor`."""
        if input_tensor.numel() != self.ranks * len(self.number):
            raise RunFailed("--exact --shard full needs a gradient of every parameter in every tile; use --shard none")
        gradients = input_tensor.view(self.ranks, -1)
        size = gradients.abs().amax(0).view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
        self.sums.largest.scatter_reduce_(0, self.number, size, "amax")
        integers = (gradients * self.sums.scales[self.number]).round_().to(torch.int32).view(-1)
        total = torch.empty(output_tensor.shape, dtype=torch.int32, device=output_tensor.device)
        _REDUCE_SCATTER(total, integers, group=group)
        self.before = total if self.before is None else self.before.add_(total)
        self.done += 1
        if self.done == self.tiles:
            output_tensor.copy_(self.before)
        else:
            output_tensor.zero_()
