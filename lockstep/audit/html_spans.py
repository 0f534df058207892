"""From a rank's records to spans of time: what it did from when to when, for the timeline of the report."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .trace import Rank, Record, where

KINDS = ("loading", "forward", "backward", "collective", "other")
_OF_LOADING = ("loader", "order", "fetch")
"""Written while a batch is on its way: what the rank did before it is further back."""
_AFTER_FORWARD = ("backward", "step", "loader", "pass_end", "collective", "end")


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time."""

    kind: str
    start: float
    end: float
    label: str = ""
    is_open: bool = False
    """Entered and never left."""


def spans_of(rank: Rank, until: float) -> list[Span]:
    """What a rank did, outer spans before those inside them; what it never left lasts to `until`."""
    loads = list(_loads(rank))
    found = [*loads, *_forwards(rank, {s.end: s.start for s in loads}), *_calls(rank, until)]
    return sorted(found, key=lambda s: (s.start, -s.end))


def _calls(rank: Rank, until: float) -> Iterator[Span]:
    opened: list[Record] = []
    for record in rank.records:
        if record.get("phase") == "in":
            opened.append(record)
        elif record.get("phase") in ("out", "failed") and opened:
            call = opened.pop()
            yield Span(_kind(call), call["t"], record["t"], _label(call))
    for call in opened:
        yield Span(_kind(call), call["t"], until, _label(call), is_open=call is opened[-1])


def _kind(call: Record) -> str:
    return call["kind"] if call["kind"] in KINDS else "other"


def _label(call: Record) -> str:
    name = call.get("op") or call["kind"]
    return f"{name} at {where(call)}" if where(call) else str(name)


def _loads(rank: Rank) -> Iterator[Span]:
    """Only the end of loading a batch is on record, and a step's sum: it is divided over what came before batches."""
    waits: list[tuple[float, Record]] = []
    before = math.inf
    batches, seconds = 0, 0.0
    for record in rank.records:
        if record["kind"] == "batch":
            waits.append((min(before, record["t"]), record))
        elif record["kind"] == "step" and "loading" in record:
            yield from _divided(waits, record["loading"])
            batches, seconds, waits = batches + len(waits), seconds + record["loading"], []
        if record["kind"] not in _OF_LOADING:
            before = record["t"]
    yield from _divided(waits, len(waits) * seconds / batches if batches else math.inf)


def _divided(waits: list[tuple[float, Record]], seconds: float) -> Iterator[Span]:
    total = sum(batch["t"] - start for start, batch in waits)
    share = min(1.0, seconds / total) if total > 0 else 0.0
    for start, batch in waits:
        yield Span("loading", batch["t"] - share * (batch["t"] - start), batch["t"], _label({**batch, "op": "loading"}))


def _forwards(rank: Rank, loading_from: dict[float, float]) -> Iterator[Span]:
    """Forward passes that go around a wrapper are not on record: they fill the time from a batch to what follows it."""
    begun: Record | None = None
    for record in rank.records:
        kind: str = record["kind"]
        t: float = record["t"]
        if begun is not None and kind in ("batch", *_AFTER_FORWARD):
            yield Span("forward", begun["t"], loading_from.get(t, t), _label({**begun, "op": "forward"}))
            begun = None
        if kind == "batch" or (kind == "input" and begun is None):
            begun = record
        elif kind == "forward":
            begun = None


def thinned(spans: list[Span], begin: float, end: float, cells: int) -> list[Span]:
    """As many spans as cells at most: each shows what took most of its time, equal neighbours are one."""
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
