"""What the ranks did, derived once from their events for judges and reports: calls, steps, passes over data."""

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TypeVar

from . import events
from .recorder import decode, unpacked
from .source import Site

E = TypeVar("E", bound=events.Event)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Call:
    """A collective, a backward pass, or the forward pass of a wrapper."""

    event: events.Collective | events.Forward | events.Backward
    end: float | None  # when it was left; None: never

    @property
    def name(self) -> str:
        return self.event.op if isinstance(self.event, events.Collective) else type(self.event).__name__.lower()


@dataclass
class Update:
    """What led to one optimizer step."""

    backwards: list[events.Backward] = field(default_factory=list)
    clips: int = 0
    syncs: list[bool] = field(default_factory=list)  # for each forward pass of DDP: whether its backward pass does
    passes: list[tuple[int, int]] = field(default_factory=list)  # for each backward pass: loader and epoch of its batch


@dataclass
class Pass:
    """One rank iterates over a DataLoader once."""

    start: events.PassStart
    trains: bool = False
    ended: bool = False
    index: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    batches: int = 0
    unused: int = 0  # batches loaded, with gradients enabled, since the last backward pass
    rows: int = 0  # the largest number of samples in a batch
    model_rows: int = 0  # the largest number of samples that the model was given at once while training on it
    after: list[events.Event] = field(default_factory=list)  # what came after its end, up to the next backward
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by index, for some: a hash of each tensor
    labels: list[int] = field(default_factory=list)  # which of these tensors are integers, hardly ever drawn
    contents: list[tuple[int, int]] = field(default_factory=list)  # indices of samples with their hashes
    backwards: int = 0

    def add(self, batch: events.Batch) -> None:
        hashes = unpacked(batch.hashes)
        self.index += batch.index
        self.hashes += hashes
        if batch.rows == len(batch.index):  # each row is a sample
            self.contents += zip(batch.index, hashes, strict=False)
            parts = [unpacked(part) for part in batch.parts]
            self.parts |= dict(zip(batch.index, zip(*parts, strict=True), strict=False))
        self.labels = batch.labels
        self.rows = max(self.rows, batch.rows)
        self.batches += 1
        self.unused += batch.grad_enabled

    @property
    def at(self) -> Site | None:
        return self.start.at


class Rank:
    """The events of one rank, in order, and how its process ended."""

    def __init__(self, number: int, events: list[events.Event], workers: list[list[events.Event]], status: int | None):
        self.number, self.events, self.workers, self.status = number, events, workers, status
        self.stack: list[Site] = []  # the user's lines when it was found to hang, innermost first
        self.printed = ""  # its standard output and error

    @cached_property
    def _by_kind(self) -> dict[type[events.Event], list[events.Event]]:
        table: dict[type[events.Event], list[events.Event]] = defaultdict(list)
        for event in self.events:
            table[type(event)].append(event)
        return table

    def of(self, kind: type[E]) -> list[E]:
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    def first(self, kind: type[E]) -> E | None:
        return next(iter(self.of(kind)), None)

    @property
    def files(self) -> set[str]:
        """The user's files that it was seen in."""
        return {event.at.file for event in self.events if event.at}

    def line(self, kind: type[E]) -> Site | None:
        """The user's line of the first event of a kind."""
        first = self.first(kind)
        return first.at if first else None

    @property
    def end(self) -> events.End | None:
        return self.first(events.End)

    @property
    def failed(self) -> bool:
        """Whether its script ended with an error, or its process without a word."""
        return not self.end.ok if self.end else bool(self.status) and not self.first(events.StepLimit)

    @property
    def error(self) -> str:
        return (self.end.error if self.end else None) or ""

    @property
    def started_ranks(self) -> int:
        """How many ranks the script starts itself; 0 if a launcher is to start them."""
        counts = [started.n for started in self.of(events.RanksStarted)]
        return max(counts + [group.world for group in self.of(events.InitGroup)]) if counts else 0

    @cached_property
    def steps(self) -> list[events.Step]:
        """Its optimizer steps; of several optimizers, those of the one with most."""
        counts = Counter(s.optimizer for s in self.of(events.Step))
        most = max(sorted(counts), key=lambda n: counts[n], default=None)
        return [s for s in self.of(events.Step) if s.optimizer == most]

    @cached_property
    def calls(self) -> list[Call]:
        """In the order they were left; those that never were at the end, outermost first."""
        calls, entered = list[Call](), list[events.Collective | events.Forward | events.Backward]()
        for event in self.events:
            if isinstance(event, (events.Collective, events.Forward, events.Backward)):
                entered.append(event)
            elif isinstance(event, events.Return) and entered:
                calls.append(Call(entered.pop(), event.t))
        return calls + [Call(event, None) for event in entered]

    @property
    def open_call(self) -> Call | None:
        """The innermost call that was never left."""
        return self.calls[-1] if self.calls and self.calls[-1].end is None else None

    @cached_property
    def updates(self) -> list[Update]:
        """What led to each finished optimizer step that has a backward pass."""
        updates, last = [Update()], (-1, -1)
        for event in self.events:
            current = updates[-1]
            if isinstance(event, events.Backward):
                current.backwards.append(event)
                current.passes.append(last)
            elif isinstance(event, events.Forward) and event.training and event.syncs is not None:
                current.syncs.append(event.syncs)
            elif isinstance(event, events.Batch):
                last = event.loader, event.epoch
            elif isinstance(event, events.Clip):
                current.clips += 1
            elif isinstance(event, events.ZeroGrad) and current.backwards:
                updates[-1] = Update()
            elif isinstance(event, events.Step):
                updates.append(Update())
        return [u for u in updates[:-1] if u.backwards]

    @cached_property
    def passes(self) -> list[Pass]:
        """Its passes over data, in the order they began."""
        return _passes(self.events)

    @property
    def outcome(self) -> str:
        """What the rank was doing at the end, in words: the predicate of "rank 0 …"."""
        call, end = self.open_call, self.end
        last = call.event if call else self.events[-1] if self.events else None
        at = self.stack[0] if self.stack else last.at if last else None
        if self.first(events.StepLimit):
            return "had taken its steps"
        if end and end.error:
            return f"had failed at {end.at}: {shorten(end.error, 160, placeholder=' …')}"
        if end:
            return "had ended" if end.ok else f"had ended with status {end.status}"
        if self.failed:
            return f"was {self.exit_status}" + (f" at {at}" if at else "")
        if not self.events:
            return "left no record"
        if call is None:
            return f"was at {at}"
        where = " (gradients are synchronised there)" if isinstance(call.event, events.Backward) else ""
        return f"waits in {call.name}{where} at {at}"

    @property
    def ending(self) -> str:
        return f"rank {self.number} {self.outcome}"

    @property
    def exit_status(self) -> str:
        """How a process ended whose script could not record it."""
        status = self.status or 0
        if status < 0:
            return f"ended by signal {-status} ({signal.strsignal(-status)})"
        return f"ended with status {status}"


def _passes(recorded: list[events.Event]) -> list[Pass]:
    found: dict[tuple[int, int], Pass] = {}
    last: Pass | None = None
    loaded: list[Pass] = []  # with batches since the last backward pass
    after: list[Pass] = []  # that ended, and what follows is still collected
    went_back = False  # since the last step
    for event in recorded:
        if isinstance(event, events.PassStart):
            found[event.loader, event.epoch] = Pass(event)
        elif isinstance(event, (events.Batch, events.PassEnd)) and (current := found.get((event.loader, event.epoch))):
            if isinstance(event, events.Batch):
                last = current
                last.add(event)
                loaded += [last] if last.unused == 1 and event.grad_enabled else []
            # some loops never ask for one batch more
            complete = isinstance(event, events.PassEnd) or current.batches == current.start.batches
            if complete and not current.ended:
                current.ended = True
                after.append(current)
        elif isinstance(event, events.Backward) and last:
            last.backwards += 1
            _train_on(loaded, last)
        elif isinstance(event, events.Step) and last and not went_back:  # by torch.autograd.grad
            _train_on(loaded, last)
        elif isinstance(event, events.ModelInput) and last:
            last.model_rows = max(last.model_rows, event.rows)
        went_back = not isinstance(event, events.Step) and (went_back or isinstance(event, events.Backward))
        after = [p for p in after if not p.trains]
        for one in after:
            one.after.append(event)
        if isinstance(event, (events.Backward, events.End)):
            after = []
    largest: Counter[Site | None] = Counter()
    for one in found.values():
        largest[one.at] = max(largest[one.at], one.model_rows)
    for one in found.values():  # the model's inputs are sampled in some steps only
        one.model_rows = one.model_rows or largest[one.at]
    return list(found.values())


def _train_on(loaded: list[Pass], last: Pass) -> None:
    """Mark the passes that a backward pass trains on: those that gave one batch for it, or else that of the last."""
    one_each = [p for p in loaded if p.unused == 1 and (not p.ended or p is last)]
    for one in one_each or [last]:
        one.trains = True
    for one in loaded:
        one.unused = 0
    loaded.clear()


@dataclass(frozen=True)
class JointPass:
    """The k-th pass at one line of the script, of each rank that made it."""

    passes: dict[int, Pass]
    """By rank."""
    world: int

    @property
    def first(self) -> Pass:
        return next(iter(self.passes.values()))

    @property
    def by_all(self) -> bool:
        return len(self.passes) == self.world

    @property
    def is_stream(self) -> bool:
        return self.first.start.is_stream

    @property
    def finished(self) -> bool:
        """By all ranks; an evaluation may be made by some only."""
        return (self.by_all or not self.first.trains) and all(one.ended for one in self.passes.values())

    @property
    def sliced(self) -> bool:
        """Whether the ranks load the same batches and give the model a slice of them each, and not all in turn."""
        first = self.first
        part = 0 < first.model_rows * self.world <= first.rows + self.world - 1
        return first.trains and part and first.model_rows * first.backwards < first.rows * first.batches

    @cached_property
    def indices(self) -> Sequence[int] | None:
        """Of all samples in the data set, in order: those of its Subset if the loader has one. None: not known."""
        start = self.first.start
        if subsets := [one.start.subset for one in self.passes.values() if one.start.subset]:
            return sorted({i for subset in subsets for i in subset})
        return None if start.size is None or start.is_subset else range(start.size)

    @property
    def samples(self) -> dict[int, list[int]]:
        """By rank: indices of samples in the data set; of a stream, hashes of its samples."""
        return {rank: one.hashes if self.is_stream else one.index for rank, one in self.passes.items()}


@dataclass(eq=False)
class Trace:
    """What all ranks did."""

    ranks: list[Rank]
    hung: bool = False
    over: bool = False  # whether the audit ended it because its time was over
    single: "Trace | None" = None  # the same script on one rank, where a judge needs it to compare

    @property
    def world(self) -> int:
        return len(self.ranks)

    @cached_property
    def readers(self) -> "Trace":
        """Without ranks that are given the samples of another on purpose, since both hold parts of one layer."""
        groups = ((rank, rank.first(events.TensorParallel)) for rank in self.ranks)
        readers = [rank for rank, group in groups if group is None or rank.number == group.ranks[0]]
        return self if len(readers) == self.world else replace(self, ranks=readers)

    @property
    def failed_probes(self) -> list[str]:
        """Probes that failed, each with its first error: what they check was not seen."""
        files = [file for rank in self.ranks for file in (rank.events, *rank.workers)]
        failures = [event for file in files for event in file if isinstance(event, events.ProbeFailed)]
        first = {failure.probe: failure.error for failure in reversed(failures)}
        return [f"{probe}: {error}" for probe, error in sorted(first.items())]

    def all(self, kind: type[E]) -> Iterator[tuple[Rank, E]]:
        for rank in self.ranks:
            for event in rank.of(kind):
                yield rank, event

    def by_key(self, kind: type[E], key: Callable[[E], K | None]) -> dict[K, list[E]]:
        """Events with the same key on every rank, one for each rank, by key in sorted order. Key None: left out."""
        tables = [{k: event for event in rank.of(kind) if (k := key(event)) is not None} for rank in self.ranks]
        shared = set.intersection(*(set(table) for table in tables))
        return {k: [table[k] for table in tables] for k in sorted(shared)}  # type: ignore[type-var]

    def difference(self, kind: type[E], value: Callable[[E], object]) -> tuple[E, ...] | None:
        """The first events, the k-th of each rank, whose values differ. Value None: left out."""
        events = ([event for event in rank.of(kind) if value(event) is not None] for rank in self.ranks)
        return next((row for row in zip(*events, strict=False) if len({repr(value(e)) for e in row}) > 1), None)

    @cached_property
    def averaging_steps(self) -> list[int]:
        """After which steps the weights of all ranks, which differed, were averaged, and equal."""
        found, differed = [], False
        for (_, n, averaged), ranks in self.by_key(events.Weights, lambda w: (w.optimizer, w.n, w.averaged)).items():
            equal = all(w.checksums == ranks[0].checksums for w in ranks)
            found += [n] if averaged and equal and differed else []
            differed = not equal
        return found

    @cached_property
    def joint_passes(self) -> list[JointPass]:
        table: dict[tuple[Site | None, int], dict[int, Pass]] = {}
        for rank in self.ranks:
            count: Counter[Site | None] = Counter()
            for one in rank.passes:
                table.setdefault((one.at, count[one.at]), {})[rank.number] = one
                count[one.at] += 1
        return [JointPass(passes, self.world) for passes in table.values()]


def read_ranks(folder: Path, world: int, statuses: list[int | None]) -> list[Rank]:
    """The ranks' files in `folder`."""
    texts = {path.name: path.read_text(errors="replace") for path in folder.glob("rank*.jsonl")}
    return [rank_of(number, texts, statuses[number]) for number in range(world)]


def rank_of(number: int, texts: dict[str, str], status: int | None) -> Rank:
    """A rank from its file and those of its loader workers, by name."""
    workers = [decode(text) for name, text in sorted(texts.items()) if name.startswith(f"rank{number}.worker")]
    return Rank(number, decode(texts.get(f"rank{number}.jsonl", "")), workers, status)
