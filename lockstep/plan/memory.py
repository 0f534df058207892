"""What one GPU has to hold during a step, and the largest micro-batch that fits."""

from dataclasses import dataclass

from .hardware import GIB
from .measure import Measured

SHARDS = ("none", "optimizer", "full")
"""What ranks share: nothing (DDP); optimizer state and averages (ZeRO-1); these, weights and gradients (FSDP2)."""
CONTEXT = 1.0 * GIB
"""Bytes that CUDA, NCCL and cuBLAS take for themselves."""
FRAGMENTATION = 0.05
"""Share of the rest that the allocator cannot use."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    activations: float

    @property
    def total(self) -> float:
        """All of them, and what CUDA and the allocator take."""
        return (self.constant + self.activations) / (1 - FRAGMENTATION) + CONTEXT

    @property
    def constant(self) -> float:
        """What does not depend on the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.averages


def memory_of(measured: Measured, micro_batch: float, shard: str = "none", world: int = 1) -> Memory:
    """Return what one of `world` GPUs holds at most during a step."""
    rest = 1 if shard == "none" else world
    all_of_it = world if shard == "full" else 1
    # Two blocks are whole at a time: one is computed while the next is gathered.
    gathered = min(measured.weights, 2 * measured.largest_block) if all_of_it > 1 else 0.0
    return Memory(
        weights=min(measured.weights, measured.weights / all_of_it + gathered),
        gradients=measured.gradients / all_of_it,
        optimizer=measured.optimizer_state / rest,
        averages=measured.averages / rest,
        activations=measured.at(micro_batch).memory,
    )


def largest_micro_batch(measured: Measured, capacity: float, shard: str = "none", world: int = 1) -> int:
    """Return how many samples fit at once; 0 if not even one does."""
    free = (capacity - CONTEXT) * (1 - FRAGMENTATION)
    empty, one = (memory_of(measured, n, shard, world) for n in (0, 1))
    per_sample = one.activations - empty.activations
    left = free - empty.constant - empty.activations
    return max(0, int(left / per_sample)) if per_sample > 0 else 0
