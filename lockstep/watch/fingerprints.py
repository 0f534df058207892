"""Checksums of gradients on a grid, which add up as the gradients do.

A gradient on the grid of an exact run is a tensor of integers. Its checksum is the sum of its elements modulo 2^64,
each times a fixed pseudo-random odd weight of its position. The checksum of a sum is therefore the sum of the
checksums: those of all tiles tell what the sum over all ranks must be, whoever has added it up.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exact import Numbered
from ..hashing import GOLDEN_GAMMA, odd_words

_BLOCK = 1 << 14
"""Elements after which the weights of positions repeat, times the weight of the block."""
_BLOCKS_KEY = 0xD1B54A32D192ED03


class Fingerprints:
    """Of one step on this rank: a checksum for each tile and parameter, and for each parameter one of the sums."""

    def __init__(self, parameters: int, device: torch.device):
        self.parameters, self.device = parameters, device
        self.start_step()

    def start_step(self) -> None:
        self.tiles: dict[int, Tensor] = {}
        """By number of the tile: (parameters,) int64."""
        self.sums = self._zeros()
        """The same of what this rank has added up, right before it is summed over the ranks."""

    def start_tile(self, number: int) -> None:
        self._tile = self.tiles[number] = self._zeros()

    def add_tile(self, gradients: Numbered, scales: Tensor) -> None:
        """Record gradients of the tile, which are floats, as they will be on the grid."""
        add_checksums(gradients, self._tile, scales)

    def add_sums(self, integers: Numbered) -> None:
        add_checksums(integers, self.sums)

    def _zeros(self) -> Tensor:
        return torch.zeros(self.parameters, dtype=torch.int64, device=self.device)


@torch.no_grad()
def add_checksums(tensors: Numbered, totals: Tensor, scales: Tensor | None = None) -> None:
    """Add to each total the checksum of the tensor with its number: of integers, or, times `scales`, of floats."""
    if totals.is_cuda:
        from ..exact_cuda import add_checksums as add_on_device

        blocks = -(-max((tensor.numel() for _, tensor in tensors), default=0) // _BLOCK)
        add_on_device(tensors, totals, scales, *_weights_on(totals.device, 1 << blocks.bit_length()))
        return
    for i, tensor in tensors:
        integers = tensor if scales is None else (tensor * scales[i]).round_().to(torch.int32)
        totals[i] += _checksum(integers.reshape(-1).numpy())


def _checksum(integers: NDArray[np.int32]) -> int:
    weights, blocks = _position_weights(), range(0, len(integers), _BLOCK)
    sums = [np.dot(part.astype(np.int64), weights[: len(part)]) for part in (integers[i : i + _BLOCK] for i in blocks)]
    return int((np.array(sums, np.int64) * _block_weights(len(sums))).sum()) if sums else 0


@cache
def _position_weights() -> NDArray[np.int64]:
    return odd_words(_BLOCK, GOLDEN_GAMMA)


@cache
def _block_weights(count: int) -> NDArray[np.int64]:
    return odd_words(count, _BLOCKS_KEY)


@cache
def _weights_on(device: torch.device, blocks: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(_position_weights()).to(device), torch.from_numpy(_block_weights(blocks)).to(device)
