"""The loss: sums from a recipe, and everything that turns them into the mean over the global batch.

A recipe returns a sum and what it is summed over. Ranks and micro-batches hold different counts (pixels that have a
label, residues that are masked), so a mean of means would be wrong: the engine divides by the count of the global
batch, and this file is the only place that does. In one step, in this order:

    micro_batches, per_sample = normalizer.count_terms(micro_batches)     a loss of several terms: counts come first
    total, weight, logs = objective(batch, epoch, index, per_sample)      forward pass of each micro-batch
    normalizer.scale(total, weight, number, samples).backward()           times what is known before the last one
    normalizer.gradient_factor()                                          what the summed gradients still need
    loss_sums.add(finished); loss_sums.means(world)                       the values that are logged
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batching import Batching, MicroBatch, Position
from .distributed import World
from .rng import Rng
from .stream import Slice

Sums = dict[str, Tensor | float]
"""What an evaluation adds up over a data set, by name."""
TermCounts = Callable[[Any, Rng], dict[str, Tensor]]
"""How many elements each term of a loss is a mean over: `term_counts(batch, rng)` of a recipe."""


class Loss:
    """A loss as a sum and what it is summed over.

    `total` is the sum over elements, `weight` how many elements there are: a Python number if it is proportional to
    the number of samples (all pixels of all images), a tensor if it depends on the data (pixels that have a label).
    `logs` are further sums over the same elements.

    A loss of several terms, each a mean over elements of its own (pixels with a scribble, pixels near one), is
    `Loss.of_terms(scribble=total, near=total)`, each total already times its coefficient. Its recipe derives from
    `SeveralTerms` and counts the elements of each term, by the same names, in `term_counts`.
    """

    def __init__(self, total: Tensor, weight: float | Tensor, **logs: Tensor):
        self.total = total
        self.weight = weight
        self.logs = logs
        self.terms: dict[str, Tensor] = {}

    @classmethod
    def of_terms(cls, **terms: Tensor) -> "Loss":
        loss = cls(torch.stack(list(terms.values())).sum(), 1.0)
        loss.terms = terms
        return loss

    def by_sample(self, per_sample: dict[str, Tensor] | None, samples: int) -> "Loss":
        """Return the same loss with one weight for all terms: the number of samples.

        `per_sample`: of each term, the elements in the global batch divided by the samples in the global batch.
        """
        if not self.terms:
            return self
        if per_sample is None or per_sample.keys() != self.terms.keys():
            raise ValueError(
                f"the loss has the terms {', '.join(self.terms)}: derive the recipe from SeveralTerms, and let "
                "term_counts() return a count under each of these names"
            )
        terms = {name: total / per_sample[name] for name, total in self.terms.items()}
        return Loss(torch.stack(list(terms.values())).sum(), samples, **terms)


def check_loss(returned: Any) -> Loss:
    """Return what a recipe's loss() returned; a ValueError that shows the right form if it is no loss."""
    form = "return Loss(error.sum(), error.numel()) with `from lockstep import Loss`"
    if not isinstance(returned, Loss):
        raise ValueError(
            f"loss() returned a {type(returned).__name__}, not a Loss: the sum over elements and how many there are. "
            f"In place of `return error.mean()` write: {form}"
        )
    if not isinstance(returned.total, Tensor) or returned.total.numel() != 1:
        shape = tuple(returned.total.shape) if isinstance(returned.total, Tensor) else type(returned.total).__name__
        raise ValueError(f"the total of a Loss is a tensor with one number, not {shape}; for example: {form}")
    for name, value in returned.logs.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"loss() logs {name} as a {type(value).__name__}: a log is a tensor, the sum over the same elements as "
                f"the loss, such as Loss(total, weight, {name}={name}.sum())"
            )
    return returned


class Objective(nn.Module):
    """The module that the engine wraps and compiles: the model, and as its forward the recipe's loss."""

    def __init__(self, loss: Callable[[nn.Module, Any, Rng], Loss], model: nn.Module, seed: int):
        super().__init__()
        self.model, self.loss, self.seed = model, loss, seed

    def forward(
        self, batch: Any, epoch: Tensor, index: Tensor, per_sample: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, float | Tensor, dict[str, Tensor]]:
        returned = self.loss(self.model, batch, Rng.of(self.seed, epoch, index))
        loss = check_loss(returned).by_sample(per_sample, len(index))
        # Without their graph: what backward does not visit would stay in memory until the end of the step.
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        return loss.total, weight, {name: value.detach() for name, value in loss.logs.items()}


class Normalizer:
    """Turns the sums of micro-batches into the gradient of the mean over the global batch.

    Each micro-batch's sum is multiplied by what is known beforehand. A weight that is a tensor is known only when the
    last micro-batch of all ranks has been through the model; gradients are multiplied by that once, at the end.
    Nothing here waits for the device.
    """

    def __init__(self, term_counts: TermCounts | None, world: World, batching: Batching, seed: int, dtype: torch.dtype):
        self.term_counts, self.world, self.global_batch = term_counts, world, batching.global_batch
        self.seed, self.dtype, self.tiles = seed, dtype, batching.tiles
        self.weight_per_sample: float | None = None
        """Where the weight is a Python number: the same for every sample, micro-batch and rank."""
        self._weights: dict[int, Tensor] = {}
        """Weights that are tensors, by number of the micro-batch."""
        self._counts: dict[int, Tensor] = {}
        """The elements of each term, by number of the micro-batch: (terms,) float64."""

    def count_terms(
        self, micro_batches: Iterable[MicroBatch], local: bool = False
    ) -> tuple[Iterable[MicroBatch], dict[str, Tensor] | None]:
        """Return the micro-batches and, of each term, the elements per sample of the global batch.

        A loss of one term is passed through: None, and the micro-batches are not even fetched. `local`: only count.
        """
        if self.term_counts is None:
            return micro_batches, None
        micro_batches, rows, names = list(micro_batches), dict[int, Tensor](), list[str]()
        for micro in micro_batches:
            if len(micro.indices):
                found = self.term_counts(micro.batch, Rng.of(self.seed, micro.epochs, micro.indices))
                names = sorted(found)
                rows[micro.number] = torch.stack([found[name].detach().double() for name in names])
        self._counts = rows
        if local:
            return micro_batches, None
        # A term without an element anywhere has a total of 0, whatever it is divided by.
        summed = (
            self._sum_tiles(rows, self.tiles) if self.tiles else self.world.sum(torch.stack(list(rows.values())).sum(0))
        )
        global_counts = summed.clamp(min=1)
        per_sample = (global_counts / self.global_batch).to(self.dtype)
        return micro_batches, dict(zip(names, per_sample, strict=True))

    def numbers(self, number: int, finished: "Finished") -> Tensor:
        """Return (n,) float64: what a micro-batch adds to the loss: total, weight, elements of each term."""
        total, weight = finished.total, _float64(finished.weight, finished.total.device)
        return torch.cat([torch.stack([total.double(), weight]), self._counts.get(number, weight.new_zeros(0))])

    def _sum_tiles(self, rows: dict[int, Tensor], tiles: int) -> Tensor:
        """Return the sum over the tiles of all ranks, in their order."""
        table = torch.zeros(tiles, *next(iter(rows.values())).shape, dtype=torch.float64, device=self.world.device)
        for number, row in rows.items():
            table[number] = row
        return self.world.sum(table).sum(0)  # the zeros of other ranks' tiles make it exact

    def scale(
        self, total: Tensor, weight: float | Tensor, number: int, samples: int, fp16_scale: float | Tensor = 1.0
    ) -> Tensor:
        """Return what to call backward on: this micro-batch's share of the mean, as far as it is known.

        All factors are multiplied first: the scale of fp16 alone would overflow a total in fp16.
        """
        factor = fp16_scale / self.global_batch
        if isinstance(weight, Tensor):
            self._weights[number] = weight
            return total * factor
        if self.weight_per_sample is None:
            self.weight_per_sample = weight / samples
        if not math.isclose(weight, self.weight_per_sample * samples, rel_tol=1e-9):
            raise ValueError(
                f"the weight of a loss is {weight:g} for {samples} samples, but was {self.weight_per_sample:g} per "
                "sample before: a weight that is a Python number must be proportional to the number of samples; "
                "return it as a tensor"
            )
        return total * (factor / self.weight_per_sample)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Drop, after the block, weights and counts of micro-batches that went through the model in it."""
        before = self._weights, self._counts
        self._weights, self._counts = {}, {}
        try:
            yield
        finally:
            self._weights, self._counts = before

    def gradient_factor(self) -> Tensor | None:
        """Return what the summed gradients are still to be multiplied by; None if they are right already."""
        if not self._weights:
            return None
        weights, self._weights = self._weights, {}
        if self.tiles:
            factor = (self.global_batch / self._sum_tiles(weights, self.tiles)).to(self.dtype)
        else:
            factor = self.global_batch / self.world.sum(torch.stack(list(weights.values())).to(self.dtype).sum())
        return torch.where(torch.isinf(factor), 0.0, factor)  # no element in the whole global batch: a sum of nothing

    def reset(self) -> None:
        """Drop the weights of a step that is not taken."""
        self._weights = {}


class Finished(NamedTuple):
    """A micro-batch that has been through the model, and its loss."""

    samples: Slice
    total: Tensor
    weight: float | Tensor
    logs: dict[str, Tensor]
    turn: str = ""
    """Of several optimizers that take turns, the one whose step it was."""
    uses_up: bool = True
    """Whether no step after it uses the same samples."""
    next_item: Position | None = None
    """As of the micro-batch."""


class LossSums:
    """Sums of losses and weights since the last log, kept on the device."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], Any] = {}
        """By turn and name."""

    def add(self, finished: list[Finished]) -> None:
        for _, total, weight, logs, turn, *_ in finished:
            for name, value in {"loss": total, "weight": weight, **logs}.items():
                self.sums[turn, name] = self.sums.get((turn, name), 0.0) + value

    def means(self, world: World) -> dict[str, float]:
        """Return each sum over all ranks divided by the weight; this waits for the device.

        The first one is a loss. Where optimizers take turns, each name begins with that of the turn.
        """
        sums, self.sums = self.sums, {}
        values = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in sums.values()])
        return _per_weight(dict(zip(sums, world.sum(values).tolist(), strict=True)))


def named(turn: str, name: str) -> str:
    """Return what a value is called that belongs to the steps of one of several optimizers."""
    return f"{turn}_{name}" if turn else name


class ExactLossSums(LossSums):
    """The same, free of rounding and so of any order: the values of all tiles are kept, and added up once."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, ...], list[Tensor]] = {}
        """By turn and names, the values of each tile."""

    def add(self, finished: list[Finished]) -> None:
        for _, total, weight, logs, turn, *_ in finished:
            values = {"loss": total, "weight": weight, **logs}
            row = torch.stack([_float64(value, total.device) for value in values.values()])
            self.rows.setdefault((turn, *values), []).append(row)

    def means(self, world: World) -> dict[str, float]:
        rows, self.rows = self.rows, {}
        ranks = world.gather({names: torch.stack(some).tolist() for names, some in rows.items()})
        sums = dict[tuple[str, str], float]()
        for turn, *names in rows if ranks else ():
            columns = zip(*(row for rank in ranks for row in rank[turn, *names]), strict=True)
            sums |= {(turn, name): _exact_sum(column) for name, column in zip(names, columns, strict=True)}
        return _per_weight(world.broadcast(sums))


def _exact_sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def sums_and_weights(finished: list[Finished]) -> Tensor:
    """Return (n, 2) float64: the sum and the weight of each micro-batch's loss."""
    pairs = [torch.stack([_float64(f.total, f.total.device), _float64(f.weight, f.total.device)]) for f in finished]
    return torch.stack(pairs)


def _float64(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a tensor on the device, without waiting for it as a copy from the host would."""
    return value.double() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)


def _per_weight(sums: dict[tuple[str, str], float]) -> dict[str, float]:
    weights = {turn: value for (turn, name), value in sums.items() if name == "weight"}
    return {
        named(turn, name): value / weights[turn] if weights[turn] else math.nan
        for (turn, name), value in sums.items()
        if name != "weight"
    }


def loss_sums(loss: Loss, counts: dict[str, Tensor] | None = None) -> Sums:
    """Return, for evaluation, a tensor (total, weight) of `loss` and of each log, or of each term, under its name."""
    if not loss.terms:
        return {name: _pair(total, loss.weight) for name, total in {"loss": loss.total, **loss.logs}.items()}
    return {name: _pair(total, (counts or {})[name]) for name, total in loss.terms.items()}


def _pair(total: Tensor, weight: float | Tensor) -> Tensor:
    return torch.stack([total.double(), torch.as_tensor(weight, dtype=torch.float64, device=total.device)])


def loss_means(sums: dict[str, Tensor], turns: Iterable[str] = ("",)) -> dict[str, float]:
    """Return the means of `loss_sums` added up over a data set; with several terms also their sum, as `loss`.

    `turns`: the names of optimizers that take turns, with which the names of the sums begin.
    """
    found = dict[str, float]()
    for turn in turns:
        start = named(turn, "")
        own = {name.removeprefix(start): pair for name, pair in sums.items() if name.startswith(start)}
        found |= {named(turn, name): value for name, value in _means(own).items()}
    return found


def _means(sums: dict[str, Tensor]) -> dict[str, float]:
    pairs = {name: pair.tolist() for name, pair in sums.items()}
    if "loss" in sums:
        return {name: total / weight if weight else math.nan for name, (total, weight) in pairs.items()}
    terms = {name: total / max(count, 1.0) for name, (total, count) in pairs.items()}
    return {"loss": sum(terms.values()), **terms}
