"""The model without training, on all ranks: evaluation, prediction, generation.

Rank r takes its contiguous share of the set, no sample twice and none left out, so a value does not depend on the
world: sums are integers or float64, added up once at the end.
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .batching import MicroBatch
from .distributed import RunFailed, World
from .loader import Fetch, is_iterable, item_getter, to_device
from .loss import Sums, check_loss, loss_means, loss_sums, named
from .nearest import nearest
from .recipe import Alternates, Batch, Evaluates, Generates, Predicts, Recipe, SeveralTerms, Tests
from .rng import Rng
from .stream import Slice
from .watch.data import Samples

KEPT_BY_BATCH = 4096
"""Exact: up to so many numbers of each batch are kept until all are added in order; more are added on each rank."""
EVALUATION_EPOCH = -1
"""The epoch in the keys of randomness outside training: the same at every evaluation."""
ReportProgress = Callable[[int, int], None]
"""report_progress(done, total), in samples of this rank."""


class EvaluationFailed(RunFailed):
    """Some rank could not evaluate, predict or generate; raised on all of them."""


class EvaluationStopped(RunFailed):
    """A stop was requested on some rank; raised on all of them."""


def share(count: int, world: World) -> range:
    """Return the numbers of this rank among 0 … count-1."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def dataset_size(dataset: Any) -> int:
    """Return the size of a set; without one, no exact metric can be computed."""
    try:
        return len(dataset)
    except TypeError:
        raise ValueError(
            "a data set without a length (an IterableDataset) cannot be split over ranks exactly; give it __len__ and "
            "__getitem__"
        ) from None


def samples_of(dataset: Any | None) -> Samples | None:
    """Return what the watch needs of a data set to compare it over the ranks; of an iterable one its first item."""
    if dataset is None:
        return None
    if is_iterable(dataset):
        return Samples(1, lambda _: [next(iter(dataset))])
    return Samples(dataset_size(dataset), item_getter(dataset))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for the duration of the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass
class Evaluator:
    """A recipe and its model, used by all ranks together; the model is in evaluation mode meanwhile."""

    recipe: Recipe
    model: nn.Module
    world: World
    autocast: AbstractContextManager[Any]
    seed: int
    whole: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Within it, this rank has all of a sharded model; every rank enters it together."""
    exact: bool = False
    """Cut the set into the same batches on any world, and add their sums in order: metrics are the same bits."""
    report_progress: ReportProgress = lambda done, total: None
    stop_requested: Callable[[], bool] = lambda: False
    """Asked before each batch; True on any rank ends the work on all of them with EvaluationStopped."""

    @contextmanager
    def shown(self, title: str, show: Callable[[str], None], after: float = 0.0) -> Iterator[None]:
        """Show the title and how many samples are done, from `after` seconds on."""
        started, before = time.monotonic(), self.report_progress

        def show_progress(done: int, total: int) -> None:
            if time.monotonic() - started >= after:
                show(f"{title}: {done} of {total}")

        if not after:
            show(title)
        self.report_progress = show_progress
        try:
            yield
        finally:
            self.report_progress = before

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Put the model, all of it on every rank, into evaluation mode for the duration of the block."""
        with self.whole(), eval_mode(self.model):
            yield

    def evaluate(
        self, dataset: Any, batch_size: int, limit: int | None = None, testing: bool = False
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the metrics over the whole set (or its first `limit` samples), and their sums; equal on every rank."""
        batch_sums = self._batch_sums(testing)

        def sums_of(numbers: range, rng: Rng) -> Sums:
            batch = self._batch(dataset, list(numbers))
            with self.autocast:
                return batch_sums(self.model, batch, rng)

        size = dataset_size(dataset)
        with self.eval_mode():
            sums = self.sum_over_ranks(min(size, limit or size), batch_size, sums_of)
        return self.recipe.metrics(sums) if isinstance(self.recipe, Evaluates) else loss_means(sums, self.turns), sums

    @cached_property
    def turns(self) -> Collection[str]:
        """The names of optimizers that take turns: the loss of each is evaluated."""
        return tuple(self.recipe.optimizers(self.model)) if isinstance(self.recipe, Alternates) else ("",)

    def _batch_sums(self, testing: bool) -> Callable[[nn.Module, Batch, Rng], Sums]:
        recipe = self.recipe
        if testing and isinstance(recipe, Tests):
            return recipe.test_batch
        if isinstance(recipe, Evaluates):
            return recipe.evaluate_batch
        counts = recipe.term_counts if isinstance(recipe, SeveralTerms) else lambda batch, rng: {}

        def one(model: nn.Module, batch: Batch, rng: Rng) -> Sums:
            return loss_sums(check_loss(recipe.loss(model, batch, rng)), counts(batch, rng))

        return in_each_turn(recipe, self.turns, one) if isinstance(recipe, Alternates) else one

    def _batch(self, dataset: Any, numbers: list[int]) -> Batch:
        items = item_getter(dataset)(numbers)
        return to_device(self.recipe.collate(items), self.world.device, torch.get_default_dtype())

    def _chunks(self, count: int, batch_size: int) -> Iterator[tuple[range, Rng]]:
        """Yield this rank's numbers among 0 … count-1, `batch_size` at a time, with their randomness."""
        numbers = share(count, self.world)
        if self.exact:  # whole batches, whichever rank has them
            batches = share(-(-count // batch_size), self.world)
            numbers = range(batches.start * batch_size, min(batches.stop * batch_size, count))
        for start in range(numbers.start, numbers.stop, batch_size):
            if self.stop_requested():
                raise EvaluationStopped("a stop was requested")
            chunk = range(start, min(start + batch_size, numbers.stop))
            yield chunk, keyed(chunk, self.world.device, self.seed)
            self.world.activity.marks += 1
            self.report_progress(chunk.stop - numbers.start, len(numbers))

    @torch.no_grad()
    def sum_over_ranks(self, count: int, batch_size: int, sums_of: Callable[[range, Rng], Sums]) -> dict[str, Tensor]:
        """Return the sums of `sums_of(numbers, rng)` over 0 … count-1, computed by all ranks; equal on each of them."""

        def own_sums() -> list[dict[str, Tensor]]:
            parts: list[dict[str, Tensor]] = []
            for chunk, rng in self._chunks(count, batch_size):
                values = {name: _widen(value, self.world.device) for name, value in sums_of(chunk, rng).items()}
                if not parts or (self.exact and sum(value.numel() for value in values.values()) <= KEPT_BY_BATCH):
                    parts.append(values)
                else:
                    parts[-1] |= {n: parts[-1][n] + value if n in parts[-1] else value for n, value in values.items()}
            return [{name: value.cpu() for name, value in part.items()} for part in parts]

        gathered = [part for parts in self._gather(own_sums) for part in parts]
        added: dict[str, Tensor] = self.world.broadcast(_add_up(gathered) if self.world.is_main else None)
        return added

    def _gather(self, compute: Callable[[], Any]) -> list[Any]:
        """Return what all ranks have computed, on rank 0; an exception of one rank is raised on all of them."""
        result, error, stopped = None, None, False
        try:
            result = compute()
        except EvaluationStopped:
            stopped = True
        except Exception as raised:
            error = f"rank {self.world.rank}: {type(raised).__name__}: {raised}", traceback.format_exc()
        gathered = self.world.gather((result, error, stopped))
        errors, stopped = self.world.broadcast(([e for _, e, _ in gathered if e], any(s for *_, s in gathered)))
        if stopped:
            raise EvaluationStopped("a stop was requested")
        if errors:
            failed = EvaluationFailed("; ".join(text for text, _ in errors))
            failed.details = errors[0][1]
            raise failed
        return [value for value, *_ in gathered]

    @torch.no_grad()
    def nonfinite_samples(self, dataset: Any, samples: Slice) -> list[int]:
        """Return, on rank 0, which of all ranks' samples have a loss that is not finite by themselves."""
        fetch = Fetch.of(self.recipe, dataset, self.seed)

        def own() -> list[int]:
            found = []
            for i, index in enumerate(samples.index.tolist()):
                (item,) = fetch.__getitems__((Slice(samples.epoch[i : i + 1], samples.index[i : i + 1]), 0, True))
                if item.error or not torch.isfinite(self._loss_of(item)).all():
                    found.append(index)
                self.world.activity.marks += 1
            return found

        with self.eval_mode():
            return sorted(index for rank in self._gather(own) for index in rank)

    def _loss_of(self, item: MicroBatch) -> Tensor:
        item = to_device(item, self.world.device, torch.get_default_dtype())
        with self.autocast:
            loss = self.recipe.loss(self.model, item.batch, Rng.of(self.seed, item.epochs, item.indices))
        return loss.total

    @torch.no_grad()
    def predict(self, dataset: Any, batch_size: int) -> list[Any]:
        """Return the recipe's prediction for each item, in order; on rank 0, an empty list elsewhere."""
        assert isinstance(self.recipe, Predicts)
        predict_batch = self.recipe.predict_batch

        def own_predictions() -> list[Any]:
            predictions: list[Any] = []
            for chunk, _ in self._chunks(dataset_size(dataset), batch_size):
                batch = self._batch(dataset, list(chunk))
                with self.autocast:
                    predicted = predict_batch(self.model, batch)
                predictions += [to_device(prediction, torch.device("cpu")) for prediction in predicted]
            return predictions

        with self.eval_mode():
            return [prediction for rank in self._gather(own_predictions) for prediction in rank]

    @torch.no_grad()
    def generate(self, count: int, settings: dict[str, Any], batch_size: int = 64) -> Tensor | None:
        """Return samples 0 … count-1, made by all ranks; on rank 0 all of them in order, elsewhere None.

        Floats are float32 at least, as no file has half ones; integers stay what they are.
        """
        assert isinstance(self.recipe, Generates)
        sample = self.recipe.sample

        def own_samples() -> list[Tensor]:
            samples = []
            for chunk, rng in self._chunks(count, batch_size):
                index = torch.tensor(list(chunk), dtype=torch.int64, device=self.world.device)
                made = sample(self.model, index, rng, **settings)
                samples.append((made.float() if made.is_floating_point() else made).cpu())
            return samples

        with self.autocast, self.eval_mode():
            gathered = [tensor for rank in self._gather(own_samples) for tensor in rank]
        return torch.cat(gathered) if gathered else None


def in_each_turn(
    recipe: Alternates, turns: Collection[str], sums_of: Callable[[nn.Module, Batch, Rng], Sums]
) -> Callable[[nn.Module, Batch, Rng], Sums]:
    """Return what evaluates the loss of each turn, and names the sums after it."""

    def each(model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        before, found = recipe.turn, Sums()
        try:
            for recipe.turn in turns:
                found |= {named(recipe.turn, name): value for name, value in sums_of(model, batch, rng).items()}
        finally:
            recipe.turn = before
        return found

    return each


def check_metric(name: str, metrics: Callable[[int | None], Mapping[str, float]], few: int) -> None:
    """Raise a ValueError if there is no metric `name`; `metrics(limit)` evaluates the first `limit` samples.

    Only an evaluation tells the names: one of a few samples, and if these do not suffice for it, of all.
    """
    with suppress(Exception):  # metrics of a set that is too small; the same on all ranks
        if name in metrics(few):
            return
    if name not in (values := metrics(None)):
        raise ValueError(unknown_metric(name, values))


def unknown_metric(name: str, values: Mapping[str, float]) -> str:
    return f"best_metric is one of {', '.join(values)}, not {name}{nearest(name, values)}"


def keyed(numbers: range, device: torch.device, seed: int) -> Rng:
    """Return the randomness of samples `numbers` outside training."""
    index = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    return Rng.of(seed, torch.full_like(index, EVALUATION_EPOCH), index)


def _widen(value: Tensor | float, device: torch.device) -> Tensor:
    wide = torch.as_tensor(value, device=device)
    return wide.to(torch.float64 if wide.is_floating_point() else torch.int64)


def _add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for sums in parts for name in sums)
    return {name: torch.stack([sums[name] for sums in parts if name in sums]).sum(0) for name in names}
