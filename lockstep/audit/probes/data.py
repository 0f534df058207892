"""Data loaders and samplers: which samples each rank was given, in which order, and with what randomness."""

import operator
import os
import random
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..events import Batch, Fetch, PassEnd, PassStart, SamplerOrder
from ..patch import Function
from ..source import Site, user_line
from .context import Context, index_of, never_raises
from .tensors import sample_hashes, tensors

_FETCHES = 4
_LARGEST_SUBSET = 100_000


def install(context: Context) -> None:
    probe = Data(context)
    context.intercept(DataLoader, "__iter__", probe.iterate)
    context.watch(_BaseDataLoaderIter, "_next_index", after=probe.requested)
    context.intercept(_BaseDataLoaderIter, "__next__", probe.next_batch)
    context.watch(DistributedSampler, "__iter__", probe.iterate_sampler)
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        context.intercept(fetcher, "fetch", probe.fetch)


class Data:
    """State of the probes of one rank's loaders."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.loaders: list[DataLoader[Any]] = []
        self.datasets: list[Any] = []
        self.epochs: dict[int, int] = {}
        self.pid, self.fetches = os.getpid(), 0
        self.loading = 0.0  # seconds since the last batch

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        self.context.in_loader += 1
        try:
            yield
        finally:
            self.context.in_loader -= 1
            self.loading += time.perf_counter() - start

    def iterate(self, original: Function, loader: DataLoader[Any]) -> Any:
        number = index_of(self.loaders, loader)
        self.epochs[number] = self.epochs.get(number, 0) + 1
        self.context.roots()
        at = user_line()
        if loader._iterator is not None:  # persistent workers use it again
            vars(loader._iterator).pop("_lockstep", None)
            vars(loader._iterator).pop("_lockstep_requested", None)
        with self._timed():
            iterator = original(loader)
        self._started(loader, iterator, number, at)
        return iterator

    @never_raises
    def _started(self, loader: DataLoader[Any], iterator: Any, number: int, at: Site | None) -> None:
        dataset, subset = _without_subsets(loader.dataset)
        event = PassStart(number, self.epochs[number], index_of(self.datasets, dataset), type(dataset).__name__, at=at)
        event.is_stream, event.is_subset = isinstance(dataset, IterableDataset), subset is not None
        event.size, event.batches = _length(loader.dataset), _length(loader)
        event.subset = subset if subset is not None and len(subset) <= _LARGEST_SUBSET else None
        event.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        event.workers, event.start_method = loader.num_workers, _start_method(loader)
        event.sampler = type(loader.sampler).__name__ if hasattr(loader, "sampler") else None
        event.in_order = _in_order(loader)
        event.drop_last = bool(loader.drop_last)
        event.sampled = _length(loader.sampler) if event.drop_last else None
        event.has_set_epoch = any(hasattr(s, "set_epoch") for s in (loader.sampler, loader.batch_sampler))
        self.recorder.write(event)
        iterator._lockstep = event, subset

    def requested(self, index: Any, iterator: Any) -> None:
        """Keep the indices whose batch is still to come: workers are ahead of the loop."""
        vars(iterator).setdefault("_lockstep_requested", deque()).append(index)

    def next_batch(self, original: Function, iterator: Any) -> Any:
        if not hasattr(iterator, "_lockstep"):
            return original(iterator)
        start, subset = iterator._lockstep
        try:
            with self._timed():
                batch = original(iterator)
        except StopIteration:
            self.context.in_loop, self.context.reading = False, None
            self.recorder.write(PassEnd(start.loader, start.epoch))
            for act in self.context.on_pass_end if torch.is_grad_enabled() else ():
                act()
            raise
        requested = vars(iterator).get("_lockstep_requested")
        index = self._index(requested.popleft(), subset) if requested else None
        self._loaded(start, batch, [] if index is None or start.is_stream else index)
        return batch

    @never_raises
    def _index(self, requested: Any, subset: list[int] | None) -> list[int] | None:
        """The indices of a batch's samples in the data set without Subsets."""
        index = _integers(requested)
        return [subset[i] for i in index] if index is not None and subset is not None else index

    def _loaded(self, start: PassStart, batch: Any, index: list[int]) -> None:
        leaves = self._leaves(batch) or []
        rows = max((len(t) for t in leaves if not t.is_nested and t.dim()), default=0)
        event = Batch(start.loader, start.epoch, rows, torch.is_grad_enabled(), index, loading=round(self.loading, 6))
        self.loading = 0.0
        self._add_hashes(event, leaves)
        self.context.batch, self.context.reading = leaves, (start.loader, start.epoch)
        self.recorder.write(event)

    @never_raises
    def _leaves(self, batch: Any) -> list[Tensor]:
        return list(tensors(batch))

    @never_raises
    def _add_hashes(self, event: Batch, leaves: list[Tensor]) -> None:
        with self.recorder.hide():
            batch = [t for t in leaves if not t.is_cuda][:4]
            event.hashes, parts = sample_hashes(batch)
        if len(batch) == len(parts) > 1:
            event.parts = parts
            event.labels = [n for n, t in enumerate(batch) if t.dim() == 1 and not t.is_floating_point()]

    def iterate_sampler(self, sampler: DistributedSampler[Any]) -> None:
        self.recorder.write(SamplerOrder(sampler.epoch, sampler.shuffle))

    def fetch(self, original: Function, fetcher: Any, index: Any) -> Any:
        if self.pid != os.getpid():  # a worker, which begins to count
            self.pid, self.fetches = os.getpid(), 0
        self.fetches += 1
        if self.fetches > _FETCHES:
            return original(fetcher, index)
        before = generator_states()
        result = original(fetcher, index)
        after = generator_states()
        worker = torch.utils.data.get_worker_info()
        drawn = {name: state for name, state in before.items() if after.get(name) != state}
        self.recorder.write(Fetch(self.fetches, worker.id if worker else None, drawn))
        return result


def _integers(index: Any) -> list[int] | None:
    """The samples of a batch, if its sampler numbers them."""
    try:
        return [operator.index(i) for i in (index if isinstance(index, (list, tuple)) else [index])]
    except TypeError:
        return None


def _start_method(loader: DataLoader[Any]) -> str | None:
    """How its workers are started; None if that is still open: asking for it must not fix it."""
    context = loader.multiprocessing_context or torch.multiprocessing
    return context.get_start_method(allow_none=True)


def _in_order(loader: DataLoader[Any]) -> bool:
    """Whether nothing shuffles."""
    if loader.batch_size is None and loader.batch_sampler is not None:  # one of the script's own
        return False
    return isinstance(loader.sampler, SequentialSampler) or getattr(loader.sampler, "shuffle", None) is False


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a stream
        return None


def _without_subsets(dataset: Any) -> tuple[Any, list[int] | None]:
    """The data set inside all Subsets, and the indices in it of the samples of `dataset`."""
    subset: list[int] | None = None
    while isinstance(dataset, Subset) and (own := _integers(list(dataset.indices))) is not None:
        subset = own if subset is None else [own[i] for i in subset]
        dataset = dataset.dataset
    return dataset, subset


def generator_states() -> dict[str, int]:
    """Return a checksum of the state of each generator of this process."""
    numpy = np.random.get_state(legacy=False)["state"]
    return {
        "random": zlib.crc32(repr(random.getstate()).encode()),
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "numpy": zlib.crc32(numpy["key"].tobytes(), numpy["pos"]),
    }
