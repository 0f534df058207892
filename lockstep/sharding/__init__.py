"""State that no rank holds whole: who keeps which part of it, and how checkpoints get all of it.

shares.py     --shard optimizer: each rank keeps optimizer state and averages of some parameters, and updates them
fully.py      --shard full: each rank keeps some rows of every parameter (FSDP2)
blocks.py     the repeated blocks of a model, and recomputing their activations
gather.py     tensors of all ranks, whole on rank 0
files.py      each rank's own file of a checkpoint
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..pieces import Piece
from .files import RankFiles as RankFiles
from .fully import FullySharded as FullySharded
from .shares import Shares as Shares


class Sharding(Protocol):
    """How the state of a run is spread over the ranks."""

    def model_state(self, model: nn.Module) -> Any:
        """Return what has `state_dict` and `load_state_dict` of this rank's part of the model."""

    def live(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that this rank keeps averages of, by name."""

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what the optimizer of this rank has, by name."""

    def restrict(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer this rank's part of its parameters."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's part of the gradients; the optimizer uses them."""

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of the whole model. Every rank calls this."""

    def publish(self) -> None:
        """Give the other ranks what they need of weights that have changed here. Every rank calls this."""

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the whole tensors by name. Every rank calls this."""

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Return what this rank writes of a part of the state: all ranks together write each number once."""

    def own(self, tensors: Mapping[str, Tensor], per_parameter: bool) -> dict[str, Tensor]:
        """Return this rank's part of whole tensors; `per_parameter`: they are "<parameter>/<state>" of an optimizer."""

    def replicated(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part of the state that all ranks hold alike."""
