"""From a rank's events to spans of time: what it did from when to when, for the timeline."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import (
    Backward,
    Batch,
    Collective,
    End,
    Event,
    Fetch,
    Forward,
    ModelInput,
    PassEnd,
    PassStart,
    SamplerOrder,
    Step,
)
from ..model import Rank

KINDS = ("loading", "forward", "backward", "collective", "other")
_WHILE_LOADING = (PassStart, SamplerOrder, Fetch)
_AFTER_FORWARD = (Batch, Backward, Step, PassStart, PassEnd, Collective, End)


@dataclass(frozen=True)
class Span:
    """A part of one rank's time."""

    kind: str
    start: float
    end: float
    label: str = ""
    is_open: bool = False
    """Entered and never left."""


def spans_of(rank: Rank, until: float) -> list[Span]:
    """What a rank did, outer spans before those inside them; what it never left lasts to `until`."""
    loads = list(_loads(rank))
    found = [*loads, *_forwards(rank, {s.end: s.start for s in loads})]
    for call in rank.calls:
        kind, end = type(call.event).__name__.lower(), until if call.end is None else call.end
        label = _label(call.name, call.event)
        found.append(Span(kind, call.event.t, end, label, is_open=call is rank.open_call))
    return sorted(found, key=lambda s: (s.start, -s.end))


def _label(name: str, event: Event) -> str:
    return f"{name} at {event.at}" if event.at else name


def _loads(rank: Rank) -> Iterator[Span]:
    """Loading a batch is recorded at its end only, and as a sum in each step: that is divided over its batches."""
    waits: list[tuple[float, Batch]] = []
    before = math.inf
    batches, seconds = 0, 0.0
    for event in rank.events:
        if isinstance(event, Batch):
            waits.append((min(before, event.t), event))
        elif isinstance(event, Step):
            yield from _divided(waits, event.loading)
            batches, seconds, waits = batches + len(waits), seconds + event.loading, []
        if not isinstance(event, _WHILE_LOADING):
            before = event.t
    yield from _divided(waits, len(waits) * seconds / batches if batches else math.inf)


def _divided(waits: list[tuple[float, Batch]], seconds: float) -> Iterator[Span]:
    total = sum(batch.t - start for start, batch in waits)
    share = min(1.0, seconds / total) if total > 0 else 0.0
    for start, batch in waits:
        yield Span("loading", batch.t - share * (batch.t - start), batch.t, _label("loading", batch))


def _forwards(rank: Rank, loading_from: dict[float, float]) -> Iterator[Span]:
    """Forward passes without a wrapper are not recorded: they fill the time from a batch to what follows it."""
    begun: Event | None = None
    for event in rank.events:
        if begun is not None and isinstance(event, _AFTER_FORWARD):
            yield Span("forward", begun.t, loading_from.get(event.t, event.t), _label("forward", begun))
            begun = None
        if isinstance(event, Batch) or (isinstance(event, ModelInput) and begun is None):
            begun = event
        elif isinstance(event, Forward):
            begun = None


def thinned(spans: list[Span], begin: float, end: float, cells: int) -> list[Span]:
    """At most as many spans as cells: each cell has the kind that took most of its time, equal neighbours are one."""
    width = (end - begin) / cells
    taken: list[dict[str, float]] = [defaultdict(float) for _ in range(cells)]
    for span in spans:
        first, last = (min(cells - 1, max(0, int((t - begin) / width))) for t in (span.start, span.end))
        for n in range(first, last + 1):
            left = begin + n * width
            taken[n][span.kind] += max(0.0, min(span.end, left + width) - max(span.start, left))
    merged: list[Span] = []
    for n, times in enumerate(taken):
        kind = max(times, key=lambda k: times[k], default="")
        if not kind or times[kind] < width - sum(times.values()):
            continue
        left = begin + n * width
        if merged and merged[-1].kind == kind and merged[-1].end == left:
            left = merged.pop().start
        merged.append(Span(kind, left, begin + (n + 1) * width, f"mostly {kind}"))
    return merged
