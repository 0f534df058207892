"""From sample indices to micro-batches on the device: DataLoader, pinned memory, copies on a side stream."""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .distributed import World
from .recipe import Recipe
from .rng import Rng
from .stream import Sizes, Slice, Stream


class MicroBatch(NamedTuple):
    """What one rank puts through the model at once."""

    batch: Any
    epochs: Tensor
    indices: Tensor
    """Which samples these are, (n,) int64; with their epochs it names their randomness."""
    samples: Slice
    """The same on the host, for the ledger."""
    last: bool
    """Whether it is the last of its step on this rank: the one that synchronises gradients."""
    error: str | None = None
    """What went wrong in a loader process, if anything."""


class Fetch:
    """Runs in the loader's processes: samples in, a collated micro-batch out."""

    def __init__(self, recipe: Recipe, dataset: Any, seed: int):
        self.dataset, self.seed, self.collate = dataset, seed, recipe.collate
        self.augment = recipe.augment if type(recipe).augment is not Recipe.augment else None

    def __getitems__(self, piece: tuple[Slice, bool]) -> MicroBatch:
        samples, last = piece
        epoch, index = torch.from_numpy(samples.epoch), torch.from_numpy(samples.index)
        try:
            return MicroBatch(self._gather(epoch, index), epoch, index, samples, last)
        except ValueError as error:
            return MicroBatch(None, epoch, index, samples, last, str(error))

    def _gather(self, epoch: Tensor, index: Tensor) -> Any:
        items = fetch_items(self.dataset, index.tolist())
        if self.augment is not None:
            rngs = (Rng.of(self.seed, epoch[i : i + 1], index[i : i + 1]) for i in range(len(index)))
            items = [self.augment(item, rng) for item, rng in zip(items, rngs, strict=True)]
        return self.collate(items) if items else None


def fetch_items(dataset: Any, indices: list[int]) -> list[Any]:
    """The items, all at once if the data set can do that."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[i] for i in indices]


def _leave_group(_: int) -> None:
    """A signal to the whole process group (Ctrl-C, a launcher's) is for the rank, which still needs its workers."""
    os.setpgid(0, 0)


def _as_it_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


class Loader:
    """This rank's micro-batches, step after step, for ever."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: Any,
        stream: Stream,
        world: World,
        sizes: Sizes,
        start: int,
        workers: int,
        dtype: torch.dtype,
    ):
        self._batches = iter(
            DataLoader(
                Fetch(recipe, dataset, stream.seed),  # type: ignore[arg-type]
                batch_sampler=_pieces(stream, world, sizes, start),  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=_as_it_is,  # type: ignore[arg-type]
                pin_memory=world.device.type == "cuda",
                prefetch_factor=4 if workers else None,
                worker_init_fn=_leave_group,
                generator=torch.Generator(),  # or it would draw from the global one, which is dropout's
            )
        )
        self._move: Callable[[Any], Any] = lambda data: to_device(data, world.device, dtype)
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._ahead: MicroBatch | None = None

    def step(self) -> Iterator[MicroBatch]:
        """The micro-batches of the next step."""
        last = False
        while not last:
            micro_batch, self._ahead = self._ahead or self._fetch(), None
            if self._side is not None:  # on a GPU the one after it is on its way already
                torch.cuda.current_stream().wait_stream(self._side)
                _record(micro_batch, torch.cuda.current_stream())
                self._ahead = self._fetch()
            last = micro_batch.last
            yield micro_batch

    def _fetch(self) -> MicroBatch:
        micro_batch = next(self._batches)
        if micro_batch.error:
            raise ValueError(micro_batch.error)
        if self._side is None:
            return self._move(micro_batch)
        with torch.cuda.stream(self._side):
            return self._move(micro_batch)


def _pieces(stream: Stream, world: World, sizes: Sizes, start: int) -> Iterator[tuple[Slice, bool]]:
    step = start
    while True:
        pieces = stream.micro_batches(step, world.rank, world.size, sizes.accumulation)
        yield from ((piece, piece is pieces[-1]) for piece in pieces)
        step += 1


def to_device(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Every tensor in a nest of dicts, tuples and lists on the device; floats in `dtype`."""
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
    """Tell the allocator that memory filled on the side stream is used on this one."""
    if isinstance(data, Tensor):
        data.record_stream(stream)
    elif isinstance(data, dict):
        for value in data.values():
            _record(value, stream)
    elif isinstance(data, list | tuple):
        for value in data:
            _record(value, stream)


def default_workers(device: torch.device) -> int:
    """Beside a GPU the CPU's cores are free to load; a CPU that trains has none to spare."""
    if device.type == "cpu":
        return 0
    return max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))
