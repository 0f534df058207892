"""State that no rank holds whole: who keeps which part of it, and how checkpoints get all of it.

shares.py     --shard optimizer: each rank keeps optimizer state and averages of some parameters, and updates them
gather.py     tensors of all ranks, whole on rank 0
"""

from .shares import Shares as Shares
