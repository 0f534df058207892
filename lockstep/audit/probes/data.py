"""Data loaders and samplers: which samples each rank was given, in which order, and with what randomness."""

import operator
import os
import random
import sys
import time
import zlib
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..patch import Function, Patches
from ..trace import Site, site
from .context import Context, careful
from .tensors import sample_hashes, tensors

_FETCHES = 4


def install(context: Context, patches: Patches) -> None:
    probe = Data(context)
    patches.wrap(DataLoader, "__iter__", probe.iterate)
    patches.wrap(_BaseDataLoaderIter, "_next_index", probe.draw)
    patches.wrap(_BaseDataLoaderIter, "__next__", probe.batch)
    patches.wrap(DistributedSampler, "__iter__", probe.order)
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.wrap(fetcher, "fetch", probe.fetch)


class Data:
    """State of the probes of one rank's loaders."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.loaders: list[DataLoader[Any]] = []
        self.datasets: list[Any] = []
        self.epochs: dict[int, int] = {}
        self.pid, self.fetches = os.getpid(), 0

    def iterate(self, original: Function) -> Function:
        def __iter__(loader: DataLoader[Any]) -> Any:
            if self.context.hidden:
                return original(loader)
            number = _place(self.loaders, loader)
            epoch = self.epochs[number] = self.epochs.get(number, 0) + 1
            self.context.roots()
            self.context.in_loader += 1
            start, at = time.perf_counter(), site()
            if loader._iterator is not None:  # workers that persist go through it again
                loader._iterator.__dict__.pop("_lockstep", None)
            try:
                iterator = original(loader)
            finally:
                self.context.in_loader -= 1
                self.context.timed(start)
            self._begun(loader, iterator, number, epoch, at)
            return iterator

        return __iter__

    @careful
    def _begun(self, loader: DataLoader[Any], iterator: Any, number: int, epoch: int, at: Site | None) -> None:
        self.recorder.write("loader", at, n=number, epoch=epoch, **self._describe(loader))
        iterator._lockstep = _Pass(number, epoch, *_root(loader.dataset))

    def _describe(self, loader: DataLoader[Any]) -> dict[str, Any]:
        root, places = _root(loader.dataset)
        seen: dict[str, Any] = {
            "dataset": _place(self.datasets, root),
            "type": type(root).__name__,
            "streams": isinstance(root, IterableDataset),
            "size": _length(loader.dataset),
            "partial": places is not None,
            "subset": places if places is not None and len(places) <= 100_000 else None,
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "batches": _length(loader),
            "workers": loader.num_workers,
            "start": _start_method(loader),
            "sampler": type(loader.sampler).__name__ if hasattr(loader, "sampler") else None,
            "drops": bool(loader.drop_last),
        }
        seen["in_order"] = _in_order(loader)
        with_epochs = [s for s in (loader.sampler, loader.batch_sampler) if hasattr(s, "set_epoch")]
        seen["follows_epochs"] = bool(with_epochs)
        return seen

    def draw(self, original: Function) -> Function:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            if hasattr(iterator, "_lockstep"):
                iterator._lockstep.drawn.append(index)
            else:
                iterator._lockstep_early = [*getattr(iterator, "_lockstep_early", []), index]
            return index

        return _next_index

    def batch(self, original: Function) -> Function:
        def __next__(iterator: Any) -> Any:
            passing = getattr(iterator, "_lockstep", None)
            if passing is None or self.context.hidden:
                return original(iterator)
            passing.drawn.extend(iterator.__dict__.pop("_lockstep_early", []))
            self.context.in_loader += 1
            start = time.perf_counter()
            try:
                batch = original(iterator)
            except StopIteration:
                self.context.in_loop = False
                self.recorder.write("pass_end", n=passing.loader, epoch=passing.epoch)
                for act in self.context.on_pass_end if torch.is_grad_enabled() else ():
                    act()
                raise
            finally:
                self.context.in_loader -= 1
                self.context.timed(start)
            self._given(iterator, passing, batch)
            return batch

        return __next__

    def _given(self, iterator: Any, passing: "_Pass", batch: Any) -> None:
        index = self._index(passing, passing.drawn.popleft() if passing.drawn else None)
        seen: dict[str, Any] = {"n": passing.loader, "epoch": passing.epoch, **({"index": index} if index else {})}
        leaves = self._leaves(batch) or []
        seen |= self._hashes(leaves) or {"hashes": ""}
        seen["rows"] = max((len(t) for t in leaves if not t.is_nested and t.dim()), default=0)
        seen["learns"] = torch.is_grad_enabled()
        self.context.given = leaves
        self.recorder.write("batch", **seen)

    @careful
    def _leaves(self, batch: Any) -> list[Tensor]:
        return list(tensors(batch))

    @careful
    def _index(self, passing: "_Pass", asked: Any) -> list[int] | None:
        """The places of a batch's samples in the data set under all Subsets."""
        index = _numbers(asked)
        if index is None or isinstance(passing.root, IterableDataset):
            return None
        return [passing.places[i] for i in index] if passing.places is not None else index

    @careful
    def _hashes(self, leaves: list[Tensor]) -> dict[str, Any]:
        with self.recorder.hide():
            batch = [t for t in leaves if not t.is_cuda][:4]
            hashes, parts = sample_hashes(batch)
        seen: dict[str, Any] = {"hashes": hashes}
        if len(batch) == len(parts) > 1:
            seen |= {
                "parts": parts,
                "labels": [n for n, t in enumerate(batch) if t.dim() == 1 and not t.is_floating_point()],
            }
        return seen

    def order(self, original: Function) -> Function:
        def __iter__(sampler: DistributedSampler[Any]) -> Any:
            if not self.context.recorder.is_hidden:
                self.recorder.write("order", epoch=sampler.epoch, shuffles=sampler.shuffle, size=len(sampler.dataset))  # type: ignore[arg-type]
            return original(sampler)

        return __iter__

    def fetch(self, original: Function) -> Function:
        def fetch(fetcher: Any, index: Any) -> Any:
            if self.pid != os.getpid():  # a worker, which begins to count
                self.pid, self.fetches = os.getpid(), 0
            self.fetches += 1
            if self.fetches > _FETCHES:
                return original(fetcher, index)
            before = _states()
            result = original(fetcher, index)
            after = _states()
            worker = torch.utils.data.get_worker_info()
            drawn = {name: state for name, state in before.items() if after.get(name) != state}
            self.recorder.write("fetch", None, n=self.fetches, worker=worker.id if worker else None, drawn=drawn)
            return result

        return fetch


class _Pass:
    """One way through a loader."""

    def __init__(self, loader: int, epoch: int, root: Any, places: list[int] | None):
        self.loader, self.epoch = loader, epoch
        self.root, self.places = root, places
        self.drawn: deque[Any] = deque()
        """Indices asked for and not yet given: workers are ahead of the loop."""


def _place(known: list[Any], thing: Any) -> int:
    for n, other in enumerate(known):
        if other is thing:
            return n
    known.append(thing)
    return len(known) - 1


def _numbers(index: Any) -> list[int] | None:
    """The samples of a batch, if its sampler numbers them."""
    try:
        return [operator.index(i) for i in (index if isinstance(index, (list, tuple)) else [index])]
    except TypeError:
        return None


def _start_method(loader: DataLoader[Any]) -> str | None:
    """How its workers are started; None if nobody has said so yet, and asking must not settle it."""
    context = loader.multiprocessing_context or torch.multiprocessing
    return context.get_start_method(allow_none=True)


def _in_order(loader: DataLoader[Any]) -> bool:
    """Whether nobody wants the samples in another order."""
    if loader.batch_size is None and loader.batch_sampler is not None:  # one of the script's own
        return False
    return isinstance(loader.sampler, SequentialSampler) or getattr(loader.sampler, "shuffle", None) is False


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # a stream
        return None


def _root(dataset: Any) -> tuple[Any, list[int] | None]:
    """The data set under all Subsets, and where in it the samples of `dataset` are."""
    places: list[int] | None = None
    while isinstance(dataset, Subset) and (own := _numbers(list(dataset.indices))) is not None:
        places = own if places is None else [own[i] for i in places]
        dataset = dataset.dataset
    return dataset, places


def _states() -> dict[str, int]:
    states = {
        "random": zlib.crc32(repr(random.getstate()).encode()),
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    }
    if "numpy" in sys.modules:
        _, keys, place, *_ = sys.modules["numpy"].random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), place)
    return states
