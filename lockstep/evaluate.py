"""The model in use, on all ranks, without training: evaluation, prediction, generation.

Rank r takes its contiguous share of the set, no sample twice and none left out, so a value does not depend on the
world: sums are integers or float64, added up once at the end.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .distributed import World
from .loader import fetch_items, to_device
from .recipe import Recipe
from .rng import Rng

EVALUATION_EPOCH = -1
"""The epoch that names randomness outside training: the same at every evaluation."""


def share(count: int, world: World) -> range:
    """The numbers of this rank among 0 … count-1."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def counted(dataset: Any) -> int:
    """The size of a set, without which an exact metric cannot be had."""
    try:
        return len(dataset)
    except TypeError:
        raise ValueError(
            "a data set without a length (an IterableDataset) cannot be shared out exactly; give it __len__ and "
            "__getitem__"
        ) from None


@torch.no_grad()
def evaluate(
    recipe: Recipe,
    model: nn.Module,
    dataset: Any,
    world: World,
    batch_size: int,
    autocast: AbstractContextManager[Any],
    seed: int,
    limit: int | None = None,
) -> dict[str, float]:
    """The recipe's metrics over the whole set (or its first `limit` samples); equal on every rank."""
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    count = min(counted(dataset), limit or counted(dataset))
    for batch, rng in _batches(dataset, share(count, world), batch_size, world.device, seed):
        with autocast:
            parts = recipe.evaluate_batch(model, batch, rng)
        for name, part in parts.items():
            exact = torch.as_tensor(part, device=world.device)
            exact = exact.to(torch.float64 if exact.is_floating_point() else torch.int64)
            sums[name] = sums[name] + exact if name in sums else exact
    model.train(was_training)
    gathered = world.gather({name: value.cpu() for name, value in sums.items()})
    return world.broadcast(recipe.metrics(_add_up(gathered)) if world.is_main else None)


def _add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def _batches(
    dataset: Any, numbers: range, batch_size: int, device: torch.device, seed: int
) -> Iterator[tuple[Any, Rng]]:
    for start in range(numbers.start, numbers.stop, batch_size):
        chosen = range(start, min(start + batch_size, numbers.stop))
        batch = default_collate(fetch_items(dataset, list(chosen)))
        yield to_device(batch, device, torch.get_default_dtype()), keyed(chosen, device, seed)


def keyed(numbers: range, device: torch.device, seed: int) -> Rng:
    """The randomness of samples `numbers` outside training."""
    index = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    return Rng.of(seed, torch.full_like(index, EVALUATION_EPOCH), index)


@torch.no_grad()
def generate(
    recipe: Recipe,
    model: nn.Module,
    count: int,
    settings: dict[str, Any],
    world: World,
    autocast: AbstractContextManager[Any],
    seed: int,
) -> Tensor | None:
    """Samples 0 … count-1, made by all ranks together; on rank 0 all of them in order, elsewhere None."""
    was_training = model.training
    model.eval()
    numbers = share(count, world)
    made = None
    if len(numbers):
        index = torch.tensor(list(numbers), dtype=torch.int64, device=world.device)
        with autocast:
            made = recipe.sample(model, index, keyed(numbers, world.device, seed), **settings).float().cpu()
    model.train(was_training)
    parts = [part for part in world.gather(made) if part is not None]
    return torch.cat(parts) if parts else None
