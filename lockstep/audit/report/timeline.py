"""The timeline of the page: what each rank did from when to when."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .. import events
from ..model import Rank, Trace

_MOST = 600
"""Spans that are drawn: the last ones."""
_TRAINING = (events.PassStart, events.Batch, events.ModelInput, events.Forward, events.Backward, events.Step)


@dataclass(frozen=True)
class Span:
    """A part of one rank's time."""

    kind: str
    start: float
    end: float
    label: str = ""
    is_open: bool = False  # entered and never left


@dataclass(frozen=True)
class Row:
    """One rank."""

    rank: Rank
    hangs: bool
    spans: list[Span]  # outer ones before those inside them


@dataclass(frozen=True)
class Timeline:
    """A window of time and what the ranks did in it."""

    rows: list[Row]
    begin: float
    end: float
    caption: str
    width: int = 980  # of the picture, in pixels

    def x(self, t: float) -> float:
        """The pixel of a time, inside the picture."""
        return round(min(max(t - self.begin, 0.0) / (self.end - self.begin) * self.width, self.width - 1), 1)

    @property
    def seconds(self) -> Iterator[tuple[float, str]]:
        """Round numbers of seconds, a fifth to a tenth of the window apart, each with its text."""
        window = self.end - self.begin
        power = 10.0 ** math.floor(math.log10(window / 5))
        interval = power * max(f for f in (1, 2, 5, 10) if f * power <= window / 5 or f == 1)
        for t in (n * interval for n in range(int(window / interval) + 1)):
            yield t, f"{t:.10g} s" if window >= 2 else f"{1000 * t:.10g} ms"


def timeline(trace: Trace) -> Timeline | None:
    """What there is to draw; None: nothing."""
    times = [event.t for rank in trace.ranks for event in rank.events]
    if not times or max(times) <= min(times):
        return None
    rows = [_row(trace, rank) for rank in trace.ranks]
    firsts = [next((e.t for e in rank.events if isinstance(e, _TRAINING)), None) for rank in trace.ranks]
    begin, caption = min(times if None in firsts else filter(None, firsts)), ""
    if begin > min(times):
        caption = f"From the first batch on; starting up took {duration(begin - min(times))} before it."
    starts = sorted(span.start for row in rows for span in row.spans)
    if len(starts) > _MOST:
        begin = max(begin, starts[-_MOST])
        caption = f"The last {_MOST} calls only, without the {duration(begin - min(times))} before them."
    end = max(*times, begin + 1e-6)
    end += 0.22 * (end - begin) if trace.hung else 0.0  # room for what never ended
    return Timeline([replace(row, spans=[s for s in row.spans if s.end > begin]) for row in rows], begin, end, caption)


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _row(trace: Trace, rank: Rank) -> Row:
    """Only a rank that hangs never left what it was in."""
    hangs = trace.hung and rank.status is None
    if not rank.events:
        return Row(rank, hangs, [])
    first, last = rank.events[0].t, rank.events[-1].t
    spans = spans_of(rank, math.inf if hangs else last)
    if hangs and not any(span.is_open for span in spans):
        spans.append(Span("other", last, math.inf, rank.outcome, is_open=True))
    whole = Span("other", first, last, "other work")
    return Row(rank, hangs, [whole, *(replace(span, is_open=span.is_open and hangs) for span in spans)])


def spans_of(rank: Rank, until: float) -> list[Span]:
    """What a rank did, outer spans before those inside them; what it never left lasts to `until`."""
    spans = [Span("loading", b.t - b.loading, b.t, _label("loading", b)) for b in rank.of(events.Batch)]
    for call in rank.calls:
        kind, end = type(call.event).__name__.lower(), until if call.end is None else call.end
        spans.append(Span(kind, call.event.t, end, _label(call.name, call.event), call is rank.open_call))
    return sorted(spans, key=lambda s: (s.start, -s.end))


def _label(name: str, event: events.Event) -> str:
    return f"{name} at {event.at}" if event.at else name
