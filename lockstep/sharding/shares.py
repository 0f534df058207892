"""`--shard optimizer` (ZeRO-1): each rank updates some of the parameters, and sends them to all others.

Only that rank keeps optimizer state and averages of them. A parameter belongs to one rank whole, so any optimizer whose
update of a parameter needs no other one does the same as without sharding, to the bit.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import World
from ..pieces import Piece
from .gather import gather_tensors


class Shares:
    """Which rank updates which parameter."""

    BYTES = 25 << 20
    """About so many are sent at a time."""
    IN_FLIGHT = 4
    """So many times BYTES are sent before the first has to be there."""

    def __init__(self, model: nn.Module, world: World):
        self.world, self._named = world, dict(model.named_parameters())
        self._owner: dict[Tensor, int] = {}
        self._buckets: list[tuple[int, list[Tensor]]] = []
        self.divide(list(self._named.values()))

    def divide(self, trained: Collection[nn.Parameter]) -> None:
        """Choose an owner for each of the parameters that an optimizer has; what none has is kept by all ranks."""
        self._owner, loads = {}, [0] * self.world.size
        for parameter in sorted(trained, key=lambda p: -p.numel()):
            self._owner[parameter] = rank = loads.index(min(loads))
            loads[rank] += parameter.numel()
        ranks = [[p for p in self._owner if self._owner[p] == rank] for rank in range(self.world.size)]
        self._buckets = [(rank, bucket) for rank, owned in enumerate(ranks) for bucket in _cut(owned)]

    def _owns(self, tensor: Tensor) -> bool:
        return self._owner.get(tensor, self.world.rank) == self.world.rank

    def model_state(self, model: nn.Module) -> nn.Module:
        """Return the model: every rank has all of it."""
        return model

    def live(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that this rank keeps averages of, by name."""
        return {name: t.detach() for name, t in model.state_dict(keep_vars=True).items() if self._owns(t)}

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what the optimizer of this rank has, by name."""
        return {name: parameter for name, parameter in self._named.items() if self._owns(parameter)}

    def restrict(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer the parameters of this rank, and no state of others."""
        self.divide([parameter for group in optimizer.param_groups for parameter in group["params"]])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not self._owns(parameter):
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if self._owns(parameter)]

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients, which every rank has."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def publish(self) -> None:
        """Give all ranks the parameters that their owners have changed. Every rank calls this."""
        sent: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
        with self.world.activity.waiting():
            for rank, bucket in self._buckets:
                flat = torch.cat([parameter.reshape(-1) for parameter in bucket])
                sent.append((bucket, flat, dist.broadcast(flat, rank, async_op=True)))
                if len(sent) > self.IN_FLIGHT:
                    self._receive(*sent.popleft())
            while sent:
                self._receive(*sent.popleft())

    def _receive(self, bucket: list[Tensor], flat: Tensor, work: dist.Work) -> None:
        work.wait()
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if not self._owns(parameter):
                parameter.copy_(piece.view(parameter.shape))

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the tensors of all ranks. Every rank calls this."""
        return gather_tensors(tensors, self.world)

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Return the tensors of this rank's parameters, and on rank 0 those that no rank owns."""
        owners = {name: self._owner.get(parameter, 0) for name, parameter in self._named.items()}
        ranks = {name: owners.get(name, owners.get(name.rpartition("/")[0], 0)) for name in tensors}
        return {name: Piece(tensor) for name, tensor in tensors.items() if ranks[name] == self.world.rank}

    def own(self, tensors: Mapping[str, Tensor], per_parameter: bool) -> dict[str, Tensor]:
        """Return the tensors, of an optimizer those of this rank's parameters."""
        if not per_parameter:
            return dict(tensors)
        others = {name for name, parameter in self._named.items() if not self._owns(parameter)}
        return {name: tensor for name, tensor in tensors.items() if name.rpartition("/")[0] not in others}

    def replicated(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part of the state that all ranks hold alike."""
        return {} if part == "optimizer" or part.startswith("ema-") else dict(tensors)


def _cut(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return the parameters in buckets of one type each."""
    buckets: list[list[Tensor]] = []
    filled: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        bucket = filled.get(parameter.dtype)
        if bucket is None or sum(p.nbytes for p in bucket) >= Shares.BYTES:
            bucket = filled[parameter.dtype] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets
