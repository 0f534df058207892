"""The model in use, on all ranks, without training: evaluation, prediction, generation.

Rank r takes its contiguous share of the set, no sample twice and none left out, so a value does not depend on the
world: sums are integers or float64, added up once at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import World
from .loader import fetch_items, to_device
from .recipe import Recipe, Sums
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
def total(
    count: int, batch_size: int, part: Callable[[range, Rng], Sums], world: World, seed: int
) -> dict[str, Tensor]:
    """The sums of `part(numbers, rng)` over 0 … count-1, made by all ranks together; the same on each of them."""
    sums: dict[str, Tensor] = {}
    numbers = share(count, world)
    for start in range(numbers.start, numbers.stop, batch_size):
        chosen = range(start, min(start + batch_size, numbers.stop))
        for name, value in part(chosen, keyed(chosen, world.device, seed)).items():
            exact = torch.as_tensor(value, device=world.device)
            exact = exact.to(torch.float64 if exact.is_floating_point() else torch.int64)
            sums[name] = sums[name] + exact if name in sums else exact
    gathered = world.gather({name: value.cpu() for name, value in sums.items()})
    added: dict[str, Tensor] = world.broadcast(_add_up(gathered) if world.is_main else None)
    return added


def evaluate(
    recipe: Recipe,
    model: nn.Module,
    dataset: Any,
    world: World,
    batch_size: int,
    autocast: AbstractContextManager[Any],
    seed: int,
    limit: int | None = None,
    of_batch: Callable[[nn.Module, Any, Rng], Sums] | None = None,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The recipe's metrics over the whole set (or its first `limit` samples), and their sums; equal on every rank."""
    of_batch = of_batch or recipe.evaluate_batch

    def part(numbers: range, rng: Rng) -> Sums:
        items = recipe.collate(fetch_items(dataset, list(numbers)))
        with autocast:
            return of_batch(model, to_device(items, world.device, torch.get_default_dtype()), rng)

    with in_use(model):
        sums = total(min(counted(dataset), limit or counted(dataset)), batch_size, part, world, seed)
    return recipe.metrics(sums), sums


@torch.no_grad()
def predict(
    recipe: Recipe,
    model: nn.Module,
    dataset: Any,
    world: World,
    batch_size: int,
    autocast: AbstractContextManager[Any],
) -> list[Any]:
    """What the recipe predicts for each item, in order; on rank 0, an empty list elsewhere."""
    made: list[Any] = []
    numbers = share(counted(dataset), world)
    with in_use(model):
        for start in range(numbers.start, numbers.stop, batch_size):
            chosen = list(range(start, min(start + batch_size, numbers.stop)))
            batch = to_device(recipe.collate(fetch_items(dataset, chosen)), world.device, torch.get_default_dtype())
            with autocast:
                made += [to_device(entry, torch.device("cpu")) for entry in recipe.predict_batch(model, batch)]
    return [entry for part in world.gather(made) for entry in part]


@contextmanager
def in_use(model: nn.Module) -> Iterator[None]:
    """Within it the model is not training."""
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def _add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


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
    batch_size: int = 64,
) -> Tensor | None:
    """Samples 0 … count-1, made by all ranks together; on rank 0 all of them in order, elsewhere None."""
    numbers = share(count, world)
    made: list[Tensor] = []
    with autocast, in_use(model):
        for start in range(numbers.start, numbers.stop, batch_size):
            chosen = range(start, min(start + batch_size, numbers.stop))
            index = torch.tensor(list(chosen), dtype=torch.int64, device=world.device)
            made.append(recipe.sample(model, index, keyed(chosen, world.device, seed), **settings).float().cpu())
    parts = [tensor for part in world.gather(made) for tensor in part]
    return torch.cat(parts) if parts else None
