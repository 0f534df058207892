"""How data are evaluated, and what a loader leaves out: layers in their mode for it, batches that are not full."""

from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import TrainingMode
from ..model import Pass, Rank, Trace

_DROPPED_IN_TRAINING, _DROPPED_IN_EVALUATION = 0.2, 0.02
"""Shares of a rank's samples."""


def judge(trace: Trace) -> Iterator[Finding]:
    yield from _modes(trace.ranks[0])
    yield from _dropped(trace.ranks[0])


def _modes(rank: Rank) -> Iterator[Finding]:
    """Of passes over data that are not trained on: statistics of BatchNorm may be made anew from those that are."""
    modes = {(mode.loader, mode.epoch): mode for mode in rank.of(TrainingMode) if mode.layers}
    trained = [(one.start.dataset, one.start.subset) for one in rank.passes if one.trains]
    for one in rank.passes:
        mode = modes.get((one.start.loader, one.start.epoch))
        later = bool(rank.steps) and one.start.t > rank.steps[0].t
        if mode and later and not one.trains and one.ended and (one.start.dataset, one.start.subset) not in trained:
            what = "data that are not trained on go through the model in training mode"
            yield finding("training-mode-evaluation", what, mode.at, f"layers: {', '.join(mode.layers[:3])}")
            return


def _dropped(rank: Rank) -> Iterator[Finding]:
    lines = set()
    for one in rank.passes:
        share = _share_dropped(one)
        if one.at in lines or share < (_DROPPED_IN_TRAINING if one.trains else _DROPPED_IN_EVALUATION):
            continue
        lines.add(one.at)
        start = one.start
        use = "trained on" if one.trains else "evaluated"
        what = f"drop_last leaves {100 * share:.0f} % of a rank's samples out of an epoch: they are not {use}"
        shuffled = one.trains and not start.in_order  # then they are others in each epoch
        sizes = f"{start.sampled} samples in batches of {start.batch_size}"
        yield finding("dropped-samples", what, one.at, sizes, severity="note" if shuffled else None)


def _share_dropped(one: Pass) -> float:
    start = one.start
    if not start.drop_last or not start.sampled or not start.batch_size or start.is_stream or not one.ended:
        return 0.0
    return (start.sampled - (start.batches or 0) * start.batch_size) / start.sampled
