"""From a rank's events to spans of time: what it did from when to when, for the timeline."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import Backward, Batch, Collective, End, Event, Forward, ModelInput, PassEnd, PassStart, Step
from ..model import Rank

KINDS = ("loading", "forward", "backward", "collective", "other")
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
    spans = list(_around_batches(rank))
    for call in rank.calls:
        kind, end = type(call.event).__name__.lower(), until if call.end is None else call.end
        spans.append(Span(kind, call.event.t, end, _label(call.name, call.event), call is rank.open_call))
    return sorted(spans, key=lambda s: (s.start, -s.end))


def _around_batches(rank: Rank) -> Iterator[Span]:
    """Loading, and forward passes without a wrapper: these are not recorded, but fill the time from a batch to what
    follows it."""
    given: Event | None = None
    for event in rank.events:
        start = event.t - event.loading if isinstance(event, Batch) else event.t
        if given is not None and isinstance(event, _AFTER_FORWARD):
            yield Span("forward", given.t, max(given.t, start), _label("forward", given))
            given = None
        if isinstance(event, Batch):
            yield Span("loading", start, event.t, _label("loading", event))
        if isinstance(event, Batch) or (isinstance(event, ModelInput) and given is None):
            given = event
        elif isinstance(event, Forward):
            given = None


def _label(name: str, event: Event) -> str:
    return f"{name} at {event.at}" if event.at else name


def thinned(spans: list[Span], begin: float, end: float, cells: int) -> list[Span]:
    """At most as many spans as cells, and the open ones: each cell has the kind that took most of its time, equal
    neighbours are one."""
    width = (end - begin) / cells
    seconds: list[dict[str, float]] = [defaultdict(float) for _ in range(cells)]
    for span in (s for s in spans if not s.is_open):
        first, last = (min(cells - 1, max(0, int((t - begin) / width))) for t in (span.start, span.end))
        for n in range(first, last + 1):
            left = begin + n * width
            seconds[n][span.kind] += max(0.0, min(span.end, left + width) - max(span.start, left))
    merged: list[Span] = []
    for n, times in enumerate(seconds):
        kind = max(times, key=lambda k: times[k], default="")
        if not kind or times[kind] < width - sum(times.values()):
            continue
        left = begin + n * width
        if merged and merged[-1].kind == kind and merged[-1].end == left:
            left = merged.pop().start
        merged.append(Span(kind, left, begin + (n + 1) * width, f"mostly {kind}"))
    return merged + [s for s in spans if s.is_open]
