"""`--shard optimizer` (ZeRO-1): each rank updates some of the parameters, and sends them to all others.

Only that rank keeps optimizer state and averages of them. A parameter belongs to one rank whole, so any optimizer whose
update of a parameter needs no other one does the same as without sharding, to the bit.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import World
from .gather import gather_tensors


class Shares:
    """Which rank updates which parameter."""

    BYTES = 25 << 20
    """About so many are sent at a time."""
    IN_FLIGHT = 4
    """So many times BYTES are sent before the first has to be there."""

    def __init__(self, parameters: Iterable[nn.Parameter], world: World):
        self.world = world
        self.owner: dict[Tensor, int] = {}
        loads = [0] * world.size
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            rank = loads.index(min(loads))
            self.owner[parameter] = rank
            loads[rank] += parameter.numel()
        self._buckets = [
            (rank, bucket)
            for rank in range(world.size)
            for bucket in _cut([p for p in self.owner if self.owner[p] == rank])
        ]

    def owns(self, tensor: Tensor) -> bool:
        """Return whether this rank keeps the state of a tensor; what no optimizer updates is kept by all."""
        return self.owner.get(tensor, self.world.rank) == self.world.rank

    def restrict(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer the parameters of this rank, and no state of others."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not self.owns(parameter):
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if self.owns(parameter)]

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
            if not self.owns(parameter):
                parameter.copy_(piece.view(parameter.shape))

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the tensors of all ranks. Every rank calls this."""
        return gather_tensors(tensors, self.world)

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
