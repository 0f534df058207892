"""From sample indices to micro-batches on the device: DataLoader, pinned memory, copies on a side stream."""

import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .batching import Batching, MicroBatch
from .distributed import World
from .recipe import Augments, Recipe
from .rng import Rng
from .stream import Slice, Stream


class Fetch:
    """Runs in the loader's processes: samples in, a collated micro-batch out."""

    def __init__(self, recipe: Recipe, dataset: Any, seed: int):
        self.items, self.seed, self.collate = item_getter(dataset), seed, recipe.collate
        self.augment = recipe.augment if isinstance(recipe, Augments) else None

    def __getitems__(self, request: tuple[Slice, int, bool]) -> list[MicroBatch]:
        """Return one micro-batch, or its error: an exception would lose its message on the way to the rank."""
        samples, number, last = request
        epoch, index = torch.from_numpy(samples.epoch), torch.from_numpy(samples.index)
        try:
            items = self.items(index.tolist())
            if self.augment is not None:
                rngs = (Rng.of(self.seed, epoch[i : i + 1], index[i : i + 1]) for i in range(len(index)))
                items = [self.augment(item, rng) for item, rng in zip(items, rngs, strict=True)]
            return [MicroBatch(self.collate(items) if items else None, epoch, index, samples, number, last)]
        except ValueError as error:
            return [MicroBatch(None, epoch, index, samples, number, last, str(error))]


def item_getter(dataset: Any) -> Callable[[list[int]], list[Any]]:
    """Return what fetches items by their indices, in one call if the data set has `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        return lambda indices: list(dataset.__getitems__(indices))
    return lambda indices: [dataset[i] for i in indices]


def _own_process_group(_: int) -> None:
    """Keep signals to the process group (Ctrl-C, a launcher's) from workers: the rank still needs them."""
    os.setpgid(0, 0)


class Loader:
    """This rank's micro-batches, step after step, without end."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: Any,
        stream: Stream,
        world: World,
        batching: Batching,
        first_step: int,
        workers: int | None,
        dtype: torch.dtype,
        repeats: Callable[[int], Sequence[int]] = lambda _: (),
    ):
        """`repeats`: the other ranks' tiles that this rank gets too in a step; they come before its own."""
        workers = default_workers(world.device) if workers is None else workers
        own = batching.own(world.rank)
        steps = (
            zip(numbers, stream.tiles(step, numbers, batching.tiles), strict=True)
            if batching.tiles
            else zip(own, stream.micro_batches(step, world.rank, world.size, batching.accumulation), strict=True)
            for step in itertools.count(first_step)
            for numbers in [[*repeats(step), *own]]
        )
        requests = ((samples, n, n == own[-1]) for step in steps for n, samples in step)
        self._batches = iter(
            DataLoader(
                Fetch(recipe, dataset, stream.seed),  # type: ignore[arg-type]
                batch_sampler=requests,  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=operator.itemgetter(0),
                pin_memory=world.device.type == "cuda",
                prefetch_factor=4 if workers else None,
                worker_init_fn=_own_process_group,
                generator=torch.Generator(),  # else it would draw from the global one, which is dropout's
            )
        )
        self._move: Callable[[Any], Any] = lambda data: to_device(data, world.device, dtype)
        self._copy_stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._prefetched: MicroBatch | None = None
        self._activity = world.activity

    def step(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step."""
        last = False
        while not last:
            micro_batch, self._prefetched = self._prefetched or self._fetch(), None
            if self._copy_stream is not None:  # on a GPU the next one is being copied meanwhile
                torch.cuda.current_stream().wait_stream(self._copy_stream)
                _record(micro_batch, torch.cuda.current_stream())
                self._prefetched = self._fetch()
            last = micro_batch.last
            yield micro_batch

    def _fetch(self) -> MicroBatch:
        activity, started = self._activity, time.perf_counter()
        activity.loads_data = True
        micro_batch = next(self._batches)
        activity.loads_data = False
        activity.data_seconds += time.perf_counter() - started
        activity.marks += 1
        if micro_batch.error:
            raise ValueError(micro_batch.error)
        if self._copy_stream is None:
            return self._move(micro_batch)
        with torch.cuda.stream(self._copy_stream):
            return self._move(micro_batch)


def to_device(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return nested dicts, tuples and lists with every tensor on the device; floats in `dtype`."""
    if isinstance(data, Tensor):
        wanted = dtype if dtype is not None and data.is_floating_point() else None
        return data.to(device, wanted, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device, dtype) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, dtype) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, dtype) for value in data)
    return data


def _record(data: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that memory filled on the copy stream is used on this one."""
    if isinstance(data, Tensor):
        data.record_stream(stream)
    elif isinstance(data, dict):
        for value in data.values():
            _record(value, stream)
    elif isinstance(data, list | tuple):
        for value in data:
            _record(value, stream)


def default_workers(device: torch.device) -> int:
    """Return up to 8 workers beside a GPU, whose CPU cores are free to load; none on a CPU that trains."""
    if device.type == "cpu":
        return 0
    return max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))
