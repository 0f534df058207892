"""The models of a script that says nothing about them: found among all objects, with names for their parameters."""

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import count

from torch import Tensor, nn

from ..parallel import is_wrapped


def _modules() -> list[nn.Module]:
    return [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]  # isinstance asks proxies for their class


def root_modules() -> list[nn.Module]:
    """Return the modules that have parameters and are no part of another, found among all objects."""
    modules = _modules()
    children = {id(child) for m in modules for child in m.children()}
    return [m for m in modules if id(m) not in children and next(m.parameters(), None) is not None]


def assign_names(modules: Iterable[nn.Module], names: dict[int, str]) -> None:
    """Add to `names`, by id, a name for each parameter that has none yet; no two are the same."""
    taken = set(names.values())
    for module in modules:
        for name, parameter in named_parameters(module):
            if id(parameter) not in names:
                numbered = (f"{name} ({n})" for n in count(2))
                unique = name if name not in taken else next(n for n in numbered if n not in taken)
                names[id(parameter)] = unique
                taken.add(unique)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by the names that they have without the wrappers of DDP and torch.compile."""
    for name, parameter in module.named_parameters():
        yield name.replace("_orig_mod.", "").removeprefix("module."), parameter


def replicated(tensor: Tensor) -> Tensor | None:
    """Return the tensor as every rank should hold it; None for a shard, which differs between ranks."""
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return tensor.to_local() if all(p.is_replicate() for p in placements) else None  # type: ignore[attr-defined]
    if tensor.is_sparse:
        return tensor.detach().coalesce().values()
    return tensor.int_repr() if tensor.is_quantized else tensor


def held_by_ddp(world_size: int) -> set[int]:
    """Return the ids of the parameters that DDP keeps equal on all ranks."""
    held = (m for m in _modules() if is_wrapped(m) and m.process_group.size() == world_size)  # type: ignore[operator]
    return {id(parameter) for module in held for parameter in module.parameters()}


def sharded_parameters() -> set[int]:
    """Return the ids of the parameters in FSDP of the first version, whose shards are plain tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FullyShardedDataParallel,) if fsdp is not None else ()
    return {id(parameter) for m in _modules() if issubclass(type(m), kinds) for parameter in m.parameters()}
