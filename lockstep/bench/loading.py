"""What a sample costs a core, from the data set to the collated batch."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from ..flags import Request
from ..loader import item_getter
from ..recipe import Augments
from ..rng import Rng

_BATCHES = 8
"""Different ones; each is made twice."""


@dataclass
class Cost:
    """Milliseconds of CPU time of one core for a sample."""

    workload: str
    batch_size: int
    read_first: float
    """When a sample is read for the first time in this process."""
    read: float
    """When it is read again, as in later epochs."""
    augment: float
    collate: float

    @property
    def total(self) -> float:
        return self.read + self.augment + self.collate

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


def measure(name: str, request: Request) -> Cost:
    """Return what a sample costs, in one thread, as in a loader process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(name, request)
    finally:
        torch.set_num_threads(threads)


def _measure(name: str, request: Request) -> Cost:
    recipe, size, seed = request.recipe(request.options), request.train.data.batch_size, request.train.data.seed
    torch.manual_seed(seed)
    if request.smoke:
        recipe.smoke()
        size = min(size, request.smoke)
    data: Any = recipe.dataset("train")
    read = item_getter(data)
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [[shuffled[(number * size + i) % len(data)] for i in range(size)] for number in range(_BATCHES)]
    seconds = {"read_first": 0.0, "read": 0.0, "augment": 0.0, "collate": 0.0}

    def timed(stage: str, act: Any, *arguments: Any) -> Any:
        began = time.process_time()
        made = act(*arguments)
        seconds[stage] += time.process_time() - began
        return made

    for batch in batches:
        timed("read_first", read, batch)
    for batch in batches:
        items = timed("read", read, batch)
        if isinstance(recipe, Augments):
            keys = [Rng.of(seed, torch.zeros(1, dtype=torch.int64), torch.tensor([i])) for i in batch]
            items = timed("augment", lambda items, keys: list(map(recipe.augment, items, keys)), items, keys)
        timed("collate", recipe.collate, items)
    return Cost(name, size, **{stage: 1000 * spent / (_BATCHES * size) for stage, spent in seconds.items()})


def table(costs: list[Cost]) -> Table:
    shown = Table(title="CPU time per sample, one thread")
    columns = ("", "batch", "read, first time", "read again", "augment", "collate", "total", "of one core")
    for number, title in enumerate(columns):
        shown.add_column(title, justify="left" if number == 0 else "right")
    for cost in costs:
        parts = (cost.read_first, cost.read, cost.augment, cost.collate, cost.total)
        rate = 1000 / cost.total if cost.total else 0.0
        times = (f"{part:.3f} ms" for part in parts)
        shown.add_row(cost.workload, str(cost.batch_size), *times, f"{rate:,.0f} samples/s")
    return shown
