"""The timeline of the page: one row per rank, coloured by what it did, hatched where it hangs."""

import math
from dataclasses import replace
from html import escape

from ..events import Backward, Batch, Forward, ModelInput, PassStart, Step
from ..model import Rank, Trace
from .parts import box, chart, legend, lines, muted, section
from .spans import KINDS, Span, spans_of, thinned

_WIDTH, _BAR, _ROW, _TOP, _AXIS = 980, 24, 56, 12, 26
_SPANS = 600
"""More than these are thinned out."""
_TICKS = 100
"""More optimizer steps of one rank than these are not all drawn."""
_TRAINING = (PassStart, Batch, ModelInput, Forward, Backward, Step)
_WORDS = {"collective": "collectives", "other": "other work"}


def timeline(trace: Trace) -> str:
    """The section."""
    window = _window(trace)
    if window is None:
        return section("timeline", "Timeline", muted("The ranks ended before there was anything to draw."))
    begin, end = window
    rows = [_spans(trace, rank, begin, end) for rank in trace.ranks]
    if is_crowded := sum(map(len, rows)) > _SPANS:
        rows = [thinned(row, begin, end, max(100, _SPANS // trace.world)) for row in rows]
    style = f"height:{_ROW}px;padding-bottom:{_ROW - _BAR - 2 * _TOP}px"
    region = '<div class="scroll" tabindex="0" role="region" aria-label="timeline of the ranks">'
    picture = f"{region}{_picture(trace, rows, begin, end)}</div>"
    drawn = chart((f"rank {rank.number}" for rank in trace.ranks), style, picture)
    return section("timeline", "Timeline", _caption(trace, begin, is_crowded), _legend(trace), drawn, _endings(trace))


def _window(trace: Trace) -> tuple[float, float] | None:
    """From the first batch, if all ranks have one, to the end; with some room after it for what never ended."""
    times = [event.t for rank in trace.ranks for event in rank.events]
    firsts = [next((e.t for e in rank.events if isinstance(e, _TRAINING)), None) for rank in trace.ranks]
    if not times or max(times) <= min(times):
        return None
    begin = min(times if None in firsts else filter(None, firsts))
    end = max(*times, begin + 1e-6)
    return begin, end + (0.22 * (end - begin) if trace.hung else 0.0)


def _hangs(trace: Trace, rank: Rank) -> bool:
    return trace.hung and rank.status is None


# -- spans ------------------------------------------------------------------------------------------------------------
def _spans(trace: Trace, rank: Rank, begin: float, end: float) -> list[Span]:
    """What a rank did in the window; only a rank that hangs never left what it was in."""
    if not rank.events:
        return []
    hangs, last = _hangs(trace, rank), rank.events[-1].t
    spans = spans_of(rank, end if hangs else last)
    if hangs and not any(s.is_open for s in spans):
        spans.append(Span("other", last, end, rank.outcome, is_open=True))
    cut = [replace(s, start=max(s.start, begin), is_open=s.is_open and hangs) for s in spans]
    return [s for s in cut if s.end > begin]


# -- drawing ----------------------------------------------------------------------------------------------------------
def _picture(trace: Trace, rows: list[list[Span]], begin: float, end: float) -> str:
    height = _ROW * trace.world + _AXIS
    scale = _WIDTH / (end - begin)
    drawn = [_row(trace, rank, row, begin, scale) for rank, row in zip(trace.ranks, rows, strict=True)]
    label = "; ".join(f"{rank.ending}, {len(rank.steps)} steps" for rank in trace.ranks)
    return (
        f'<svg class="timeline" width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(label)}">'
        '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="8"/></pattern></defs>'
        f"{_grid(begin, end, scale, height)}{''.join(drawn)}</svg>"
    )


def _row(trace: Trace, rank: Rank, spans: list[Span], begin: float, scale: float) -> str:
    if not rank.events:
        return ""
    top = trace.ranks.index(rank) * _ROW + _TOP
    first, last = max(begin, rank.events[0].t), rank.events[-1].t
    parts = [_bar(Span("other", first, last, "other work"), begin, scale, top)] if last > first else []
    parts += [_bar(span, begin, scale, top) for span in spans]
    steps = rank.steps[:: _every(len(rank.steps))]
    parts += [_tick(step, begin, scale, top) for step in steps if step.t >= begin]
    if _hangs(trace, rank):
        text = escape(rank.outcome if len(rank.outcome) < 140 else rank.outcome[:139] + "…")
        parts.append(f'<text class="waiting" x="{_WIDTH - 2}" y="{top + _BAR + 15}" text-anchor="end">{text}</text>')
    elif rank.failed:
        parts.append(_cross((last - begin) * scale, top))
    return "".join(parts)


def _bar(span: Span, begin: float, scale: float, top: float) -> str:
    width = max(0.75, (span.end - span.start) * scale)
    x = min((span.start - begin) * scale, _WIDTH - width)
    shape = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
    if span.is_open:
        title = f"<title>{escape(span.label)}: never left</title>"
        return f'<rect class="track" {shape}/><rect class="hung" {shape}>{title}</rect>'
    title = f"<title>{escape(span.label)}, {_duration(span.end - span.start)}</title>"
    return f'<rect class="{span.kind}" {shape}>{title}</rect>'


def _every(steps: int) -> int:
    """One step in how many has a tick."""
    return max(1, math.ceil(steps / _TICKS))


def _tick(step: Step, begin: float, scale: float, top: float) -> str:
    x = min((step.t - begin) * scale, _WIDTH - 1)
    return f'<path class="step" d="M{x:.1f} {top - 7}V{top}"><title>optimizer step {step.n}</title></path>'


def _cross(x: float, top: float) -> str:
    x, y = min(max(x, 7), _WIDTH - 7), top + _BAR / 2
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10"><title>failed</title></path>'


def _grid(begin: float, end: float, scale: float, height: int) -> str:
    """Lines at round numbers of seconds, a fifth to a tenth of the window apart, each with its time."""
    seconds = end - begin
    power = 10.0 ** math.floor(math.log10(seconds / 5))
    interval = power * max(f for f in (1, 2, 5, 10) if f * power <= seconds / 5 or f == 1)
    drawn = ""
    for n in range(int(seconds / interval) + 1):
        t, x = n * interval, n * interval * scale
        anchor = "start" if n == 0 else "end" if x > _WIDTH - 24 else "middle"
        time = f"{t:.10g} s" if seconds >= 2 else f"{1000 * t:.10g} ms"
        drawn += f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - _AXIS + 6}"/>'
        drawn += f'<text x="{x:.1f}" y="{height - 5}" text-anchor="{anchor}">{time}</text>'
    return drawn


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


# -- words ------------------------------------------------------------------------------------------------------------
def _caption(trace: Trace, begin: float, is_crowded: bool) -> str:
    started = min(event.t for rank in trace.ranks for event in rank.events)
    every = max(_every(len(rank.steps)) for rank in trace.ranks)
    sentences = [
        f"From the first batch on; starting up took {_duration(begin - started)} before it." if begin > started else "",
        "Each span has the colour of what took most of its time." if is_crowded else "",
        f"One optimizer step in {every} has a tick." if every > 1 else "",
    ]
    return muted(" ".join(filter(None, sentences)), "muted lede") if any(sentences) else ""


def _legend(trace: Trace) -> str:
    items = [(box(kind), _WORDS.get(kind, kind)) for kind in KINDS]
    items.append(('<path class="step" d="M7 1V13"/>', "optimizer step"))
    if any(_hangs(trace, rank) for rank in trace.ranks):
        items.append(('<rect class="hung" x=".5" y=".5" width="13" height="13"/>', "never left"))
    if any(rank.failed for rank in trace.ranks):
        items.append(('<path class="cross" d="M2 2l10 10m0 -10l-10 10"/>', "failed"))
    return legend(items)


def _endings(trace: Trace) -> str:
    if not any(_hangs(trace, rank) or rank.failed for rank in trace.ranks):
        return ""
    return lines("endings", (rank.ending for rank in trace.ranks))
