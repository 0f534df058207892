"""`--shard full`: each rank keeps some rows of every parameter, of its gradient, optimizer state and average (FSDP2).

Each block of the model, and what is in no block, is put together on all ranks right before it is used, and dropped
after. The root is the objective, so that all of a recipe's loss runs within it, whatever it calls of the model.
What a rank keeps are plain tensors, its rows: optimizer, averages and checkpoints do not know of DTensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import World
from ..loss import Objective
from .blocks import find_blocks, wrap_forward

ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
               torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)  # fmt: skip
"""Optimizers whose update of a number needs that number's gradient and state alone: they may have rows only."""


class FullySharded:
    """An objective whose parameters are spread over the ranks by rows."""

    def __init__(self, objective: Objective, world: World):
        """The objective's model may be on the meta device; see `fill`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.objective, self.model, self.world = objective, objective.model, world
        model = self.model
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.blocks = find_blocks(model)
        mesh = init_device_mesh(world.device.type, (world.size,))
        self._units: list[Any] = []
        self._hooks: list[tuple[dict[int, Any], list[int]]] = []
        for module in [*self.blocks, objective]:
            tables = [module._forward_pre_hooks, module._forward_hooks]
            before = [set(table) for table in tables]
            unit = fully_shard(module, mesh=mesh)
            self._hooks += [(t, [key for key in t if key not in old]) for t, old in zip(tables, before, strict=True)]
            unit.set_gradient_divide_factor(1.0)  # sums over ranks: loss.py divides
            unit.set_force_sum_reduction_for_comms(True)
            self._units.append(unit)

    @torch.no_grad()
    def fill(self, source: nn.Module | None) -> None:
        """Make the parameters and buffers real, with the values of `source`, which rank 0 has."""
        self.objective.to_empty(device=self.world.device)
        whole: dict[str, Tensor] = {}
        if source is not None:
            whole = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device)
            if self.world.is_main:
                sent.copy_(whole[name])
            dist.broadcast(sent, 0)
            local(tensor).copy_(self.rows(sent) if name in self.shapes else sent)
        for unit in self._units:  # the storage of the rows is final only then
            unit.unshard()
            unit.reshard()
        self._rows: dict[Tensor, nn.Parameter] = {
            p: nn.Parameter(local(p.detach()), p.requires_grad) for p in self.model.parameters()
        }

    def rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a parameter."""
        size = -(-len(whole) // self.world.size)
        start = min(self.world.rank * size, len(whole))
        return whole[start : start + size]

    def compile(self) -> None:
        """Compile each block; hooks, which put its parameters together, stay outside."""
        for block in self.blocks:
            wrap_forward(block, torch.compile)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have all parameters on every rank for the duration of the block, as in a plain model.

        Ranks may then call the model any number of times. Every rank enters and leaves together.
        """
        for unit in self._units:
            unit.unshard()
        saved = [(table, dict(table), keys) for table, keys in self._hooks]
        for table, _, keys in saved:
            for key in keys:
                del table[key]
        try:
            yield
        finally:
            for table, before, _ in saved:
                table.clear()
                table.update(before)
            for unit in self._units:
                unit.reshard()

    def model_state(self, model: nn.Module) -> "FullySharded":
        """Return what has the `state_dict` of the model: this."""
        return self

    def state_dict(self) -> dict[str, Tensor]:
        return self.live(self.model)

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(tensors[name])

    def live(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's rows of the parameters, and the buffers."""
        return {name: local(tensor) for name, tensor in model.state_dict().items()}

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return this rank's rows as plain parameters, which the optimizer has, by name."""
        return {name: self._rows[parameter] for name, parameter in model.named_parameters()}

    def restrict(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this rank's rows, as plain parameters."""
        if not isinstance(optimizer, ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"--shard full gives an optimizer some rows of each parameter, and {type(optimizer).__name__} may need "
                f"whole ones; use --shard optimizer, or one of {known}"
            )
        state: dict[Tensor, Any] = {
            self._rows[p]: {key: local(value) for key, value in found.items()} for p, found in optimizer.state.items()
        }
        optimizer.state.clear()
        optimizer.state.update(state)
        for group in optimizer.param_groups:
            group["params"] = [self._rows[parameter] for parameter in group["params"]]

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's rows of the gradients, and give them to the plain parameters."""
        found = []
        for parameter in parameters:
            if parameter.grad is not None:
                found.append(local(parameter.grad))
                self._rows[parameter].grad = found[-1]
        return found

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all rows of all ranks."""
        own = torch.nn.utils.get_total_norm(gradients)
        return self.world.sum(own.double().square()).sqrt().to(own.dtype)

    def publish(self) -> None:
        """Drop the gradients: weights are put together when they are used."""
        for parameter in self._rows.values():
            parameter.grad = None

    @torch.no_grad()
    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the whole tensors in host memory. Every rank calls this."""
        found = {}
        for name, tensor in sorted(tensors.items()):  # a checkpoint's are read in another order by each process
            whole = self._joined(name, tensor)
            if self.world.is_main:
                found[name] = whole.cpu()
        return found

    def _joined(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, if a tensor has rows of a parameter."""
        shape = self._shape_of(name)
        if shape is None or tuple(tensor.shape) != (self._count(shape[0]), *shape[1:]):
            return tensor
        size = -(-shape[0] // self.world.size)
        padded = tensor.new_zeros(size, *shape[1:])
        padded[: len(tensor)] = tensor
        whole = tensor.new_empty(size * self.world.size, *shape[1:])
        _ALL_GATHER(whole, padded)
        return whole[: shape[0]]

    def _count(self, rows: int) -> int:
        size = -(-rows // self.world.size)
        return max(0, min(size, rows - self.world.rank * size))

    def _shape_of(self, name: str) -> torch.Size | None:
        return self.shapes.get(name) or self.shapes.get(name.rpartition("/")[0])

    def own(self, tensors: Mapping[str, Tensor], per_parameter: bool) -> dict[str, Tensor]:
        """Return this rank's rows of whole tensors."""
        return {name: self.rows(t) if t.shape == self._shape_of(name) else t for name, t in tensors.items()}

    def replicated(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part of the state that all ranks hold alike: buffers and counters."""
        return {n: t for n, t in tensors.items() if self._shape_of(n) is None or t.dim() == 0}


_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


def local(tensor: Any) -> Any:
    """Return this rank's rows of a DTensor, in the same memory; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
