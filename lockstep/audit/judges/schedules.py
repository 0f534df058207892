"""Learning rates: the same on all ranks, and not at their end long before the training is."""

from collections import Counter
from collections.abc import Iterator

from ...watch.agreement import disagreement
from .. import events
from ..catalog import Finding, finding
from ..model import Rank, Trace

_NOTHING = 1e-6
"""Share of the largest rate below which nothing is learned."""


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world > 1:
        yield from _differences(trace)
    if all(rank.end and rank.end.ok for rank in trace.ranks):
        yield from _too_fast(trace.ranks[0])


def _differences(trace: Trace) -> Iterator[Finding]:
    if plateaus := trace.difference(events.SchedulerStep, lambda s: s.metric):
        values = ", ".join(f"rank {n}: {s.metric:g}" for n, s in enumerate(plateaus))
        what = "the schedule is driven by a value that differs between ranks"
        yield finding("differing-schedule", what, plateaus[0].at, values)
        return
    for (n, _), steps in trace.by_key(events.Step, lambda s: (s.n, s.optimizer)).items():
        if found := disagreement([{"lr": s.lr} for s in steps]):
            at = next((scheduler.at for _, scheduler in trace.all(events.SchedulerStep)), steps[0].at)
            rates = f"at step {n}: {steps[0].lr} on rank 0, {steps[found[1]].lr} on rank {found[1]}"
            yield finding("differing-schedule", "the learning rate differs between ranks", at, rates)
            return
    if scalers := trace.difference(events.Scaler, lambda s: s.scale):
        yield finding("differing-schedule", "the scale of the gradient scaler differs between ranks", scalers[0].at)


def _too_fast(rank: Rank) -> Iterator[Finding]:
    """A schedule that is at its end for a quarter of the steps, or that goes through its period more than once since it
    is stepped more often than the optimizer."""
    calls = Counter(s.scheduler for s in rank.of(events.SchedulerStep) if s.metric is None)
    rates = [max(step.lr, default=0.0) for step in rank.steps]
    if not calls or len(rates) < 8:
        return
    (scheduler, count), peak = calls.most_common(1)[0], max(rates)
    first = next(s for s in rank.of(events.SchedulerStep) if s.scheduler == scheduler)
    learning = max((n for n, rate in enumerate(rates, 1) if rate > _NOTHING * peak), default=0)
    seen = f"scheduler.step() is called {count} times in {len(rates)} steps of the optimizer"
    if learning <= 0.75 * len(rates) and peak > 0:
        what = f"the learning rate is 0 from step {learning + 1} of {len(rates)} on"
        yield finding("schedule-too-fast", what, first.at, seen)
    elif first.horizon and count >= 1.5 * first.horizon and count >= 1.5 * len(rates):
        what = f"the schedule ends after {first.horizon} steps, and is stepped {count} times"
        yield finding("schedule-too-fast", what, first.at, seen)
