"""Averages of the weights (EMA): updated once in a step, and used for something."""

from collections import Counter
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import AverageChanged, AverageRead, Save
from ..model import Rank, Trace
from ..source import Site


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    changes: dict[int, list[bool]] = {}
    for change in rank.of(AverageChanged):
        changes.setdefault(change.average, []).append(change.between)
    for average, between in changes.items():
        lines = Counter(read.at for read in rank.of(AverageRead) if read.average == average and not read.is_use)
        at = lines.most_common(1)[0][0] if lines else None
        if sum(between) >= 2:
            what = "the average of the weights is updated in every micro-batch, and the weights change in every step"
            seen = f"it was another {sum(between)} times in a backward pass before the optimizer had stepped"
            yield finding("average-per-micro-batch", what, at, seen)
        elif _is_unused(average, lines, rank):
            what = "an average of the weights is updated, and never evaluated or saved"
            yield finding("unused-average", what, at, f"its weights are read at {at} only")
            return


def _is_unused(average: int, lines: Counter[Site | None], rank: Rank) -> bool:
    """Whether a whole run, with an evaluation or a checkpoint, only ever reads an average to update it: at lines that
    come in nearly every step, and several times in an epoch."""
    training = sum(one.trains for one in rank.passes)
    whole = rank.end is not None and rank.end.ok and len(rank.steps) >= max(4, 2 * training)
    needed = rank.first(Save) is not None or any(not one.trains and one.batches for one in rank.passes)
    updates = {line for line, n in lines.items() if n >= 0.8 * (len(rank.steps) - 1)}
    used = any(read.is_use for read in rank.of(AverageRead) if read.average == average)
    return whole and needed and not used and bool(lines) and set(lines) <= updates
