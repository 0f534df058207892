"""`--shard full`: each rank keeps some rows of every parameter, of its gradient, optimizer state and average (FSDP2).

Each block of the model, and what is in no block, is put together on all ranks right before it is used, and dropped
after. The root is the objective, so that all of a recipe's loss runs within it, whatever it calls of the model.
What a rank keeps are plain tensors, its rows: optimizer, averages and checkpoints do not know of DTensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import World
from ..exact import ExactSums
from ..loss import Objective
from ..pieces import Piece
from .blocks import find_blocks, wrap_forward

ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
               torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)  # fmt: skip
"""Optimizers whose update of a number needs that number's gradient and state alone: they may have rows only."""


VECTOR = 64
"""Kernels may compute the last elements of a tensor, up to so many, in another way than all before."""


class FullySharded:
    """An objective whose parameters are spread over the ranks by rows."""

    def __init__(self, objective: Objective, world: World, exact: bool = False):
        """The objective's model may be on the meta device; see `fill`. `exact`: results have the bits of DDP."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.objective, self.model, self.world = objective, objective.model, world
        model = self.model
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.blocks = find_blocks(model)
        mesh = init_device_mesh(world.device.type, (world.size,))
        self.exact = exact
        self._whole: dict[str, nn.Parameter] = {}
        """Parameters that all ranks update whole: of an exact run, those whose rows begin where no vector does."""
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
        for name, parameter in self.model.named_parameters() if self.exact else ():
            shape = self.shapes[name]
            if -(-shape[0] // self.world.size) * shape[1:].numel() % VECTOR:
                joined = self._join(local(parameter), shape)
                self._whole[name] = self._rows[parameter] = nn.Parameter(joined, parameter.requires_grad)
        self._whole_ones = set(self._whole.values())

    def sum_exactly(self, sums: ExactSums, tiles: int) -> None:
        """Sum gradients as integers; `tiles`: those of each rank in a step."""
        from .rows import RowSums

        for unit in self._units:
            state = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the latter in torch 2.11
            parameters = [found.sharded_param for group in groups if group for found in group.fsdp_params]
            if any(parameter.requires_grad for parameter in parameters):
                by_rows = RowSums(parameters, sums, tiles)
                unit.set_custom_reduce_scatter(by_rows)
                sums.by_rows.append(by_rows)

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
        self.publish()

    def live(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's rows of the parameters, and the buffers."""
        rows = {name: local(tensor) for name, tensor in model.state_dict().items()}
        return rows | {name: parameter.detach() for name, parameter in self._whole.items()}

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
            self._rows[p]: {key: self._part(p, value) for key, value in found.items()}
            for p, found in optimizer.state.items()
        }
        optimizer.state.clear()
        optimizer.state.update(state)
        for group in optimizer.param_groups:
            group["params"] = [self._rows[parameter] for parameter in group["params"]]

    def _part(self, parameter: Tensor, value: Any) -> Any:
        """Return what this rank keeps of a gradient or a state, a DTensor, of a parameter."""
        rows = local(value)
        return self._join(rows, parameter.shape) if self._rows[parameter] in self._whole_ones else rows

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's rows of the gradients, and give them to the plain parameters."""
        found = []
        self._with_gradient = [(p.shape, self._rows[p]) for p in parameters if p.grad is not None]
        for parameter in parameters:
            if parameter.grad is not None:
                found.append(self._part(parameter, parameter.grad))
                self._rows[parameter].grad = found[-1]
        return found

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all rows of all ranks; in an exact run of whole gradients, in the order of DDP's."""
        if self.exact:
            return self._exact_norm(gradients)
        own = torch.nn.utils.get_total_norm(gradients)
        return self.world.sum(own.double().square()).sqrt().to(own.dtype)

    def _exact_norm(self, gradients: list[Tensor]) -> Tensor:
        norms = []
        for gradient, (shape, own) in zip(gradients, self._with_gradient, strict=True):
            whole = gradient if own in self._whole_ones else self._join(gradient, shape)
            norms.append(torch._foreach_norm([whole])[0] if whole.is_cuda else torch.linalg.vector_norm(whole))
        return torch.linalg.vector_norm(torch.stack(norms))

    def publish(self) -> None:
        """Drop the gradients, and take the rows of what is updated whole: units are put together when they are used."""
        for parameter, own in self._rows.items():
            own.grad = None
            if own in self._whole_ones:
                local(parameter.detach()).copy_(self.rows(own.detach()))

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
        return self._join(tensor, shape) if shape is not None and self._has_rows(name, tensor, shape) else tensor

    def _has_rows(self, name: str, tensor: Tensor, shape: torch.Size) -> bool:
        """Return whether a tensor has this rank's rows of a parameter of that shape."""
        return not self._is_whole(name) and tuple(tensor.shape) == (self._count(shape[0]), *shape[1:])

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Return this rank's rows of parameters, and on rank 0 all else."""
        found = {}
        for name, tensor in tensors.items():
            shape = self._shape_of(name)
            if shape is not None and self._has_rows(name, tensor, shape):
                if len(tensor) or self.world.is_main:
                    found[name] = Piece(tensor, self.world.rank * -(-shape[0] // self.world.size))
            elif self.world.is_main:
                found[name] = Piece(tensor)
        return found

    def _join(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        size = -(-shape[0] // self.world.size)
        padded = tensor.new_zeros(size, *shape[1:])
        padded[: len(tensor)] = tensor
        whole = tensor.new_empty(size * self.world.size, *shape[1:])
        _ALL_GATHER(whole, padded)
        return whole[: shape[0]]

    def following(self, change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        """Return `change`, after which the tensors that are also kept whole have what it has written to the rows."""

        @torch.no_grad()
        def changed(model: nn.Module) -> None:
            change(model)
            for parameter, own in self._rows.items():
                if own in self._whole_ones:
                    own.copy_(self._join(local(parameter.detach()), parameter.shape))

        return changed

    def _is_whole(self, name: str) -> bool:
        """Return whether a tensor is a parameter, or its state, that all ranks update whole."""
        return name in self._whole or name.rpartition("/")[0] in self._whole

    def _count(self, rows: int) -> int:
        size = -(-rows // self.world.size)
        return max(0, min(size, rows - self.world.rank * size))

    def _shape_of(self, name: str) -> torch.Size | None:
        return self.shapes.get(name) or self.shapes.get(name.rpartition("/")[0])

    def own(self, tensors: Mapping[str, Tensor], per_parameter: bool) -> dict[str, Tensor]:
        """Return this rank's rows of whole tensors."""
        found = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.shape == self._shape_of(name) and not self._is_whole(name):
                found[name] = self.rows(tensor)
        return found

    def replicated(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part of the state that all ranks hold alike: buffers and counters."""
        return {n: t for n, t in tensors.items() if self._shape_of(n) is None or t.dim() == 0}


_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


def local(tensor: Any) -> Any:
    """Return this rank's rows of a DTensor, in the same memory; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
