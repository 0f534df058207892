"""lockstep audit --worlds 1,2: one script on several numbers of ranks with the same global batch, losses compared.

The batch size of a rank is what the script says on the largest number of ranks; on fewer ranks it is larger.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from .. import events
from ..catalog import Finding, finding
from ..judges import judge
from ..launcher import run_ranks
from ..model import Trace
from ..verdict import counted
from ..worker import LaunchSpec
from .flags import with_batch_size
from .track import TrackedStep, track

_ROUNDING = 1e-3
"""Relative difference of two losses up to which it may be rounding; in the first step a tenth of it."""
_SEED = 0


@dataclass
class _Run:
    """A run on one number of ranks."""

    trace: Trace
    steps: list[list[TrackedStep]]
    """By step, then by rank."""

    @property
    def world(self) -> int:
        return self.trace.world

    def __str__(self) -> str:
        return counted(self.world, "rank")

    def loss(self, n: int) -> float | None:
        """The mean over ranks of what a step went backward from; None: not known."""
        sums = [math.fsum(step.losses) for step in self.steps[n] if step.losses]
        return fmean(sums) if len(sums) == self.world else None

    def samples(self, n: int) -> Counter[object]:
        return Counter(sample for step in self.steps[n] for sample in step.samples)

    def lr(self, n: int) -> list[float]:
        return self.steps[n][0].lr

    @property
    def first_weights(self) -> dict[str, int] | None:
        start = self.steps[0][0].start
        return start.weights if start else None


def worlds(
    spec: LaunchSpec, sizes: list[int], batch_arg: str | None, patience: float, limit: float
) -> tuple[Trace, list[Finding], list[str]]:
    """Return the run on most ranks, where the others part from it and why, and notes on what was compared."""
    most, traces = max(sizes), list[Trace]()
    for size in sorted(sizes):
        factor = most / size
        there = replace(spec, nproc=size, in_detail=True, seed=_SEED)
        if batch_arg is None:
            there = replace(there, batch_factor=factor)
        else:
            there = replace(there, argv=with_batch_size(spec.argv, batch_arg, factor))
        trace = run_ranks(there, patience, limit)
        if trace.hung or any(rank.failed for rank in trace.ranks):
            return trace, judge(trace), [f"the run on {size} ranks failed"]
        traces.append(trace)
    how = f"{batch_arg} of the script" if batch_arg else "the batch size of each DataLoader"
    factors = " and ".join(f"× {most / trace.world:.3g} on {counted(trace.world, 'rank')}" for trace in traces)
    found, notes = compare(traces)
    return traces[-1], found, [f"{how} was {factors}", *notes]


def compare(traces: list[Trace]) -> tuple[list[Finding], list[str]]:
    """Return where the runs on more ranks part from the first, one finding of a kind, and notes on what agrees."""
    runs = [_Run(trace, _joint_steps(trace)) for trace in traces]
    if not all(run.steps for run in runs):
        raise ValueError("the script took no step on one of the numbers of ranks: nothing to compare")
    found, notes = dict[str, Finding](), list[str]()
    for run in runs[1:]:
        differences = list(_differences(runs[0], run))
        for one in differences:
            found.setdefault(one.kind.name, one)
        notes += [] if differences else [_agreement(runs[0], run)]
    return list(found.values()), notes


def _joint_steps(trace: Trace) -> list[list[TrackedStep]]:
    return [list(step) for step in zip(*(track(rank).steps for rank in trace.ranks), strict=False)]


def _differences(one: _Run, many: _Run) -> Iterator[Finding]:
    """Where two runs part, by cause: what lies before the loss explains it."""
    at = many.trace.ranks[0].line(events.OptimizerInit)
    count = min(len(one.steps), len(many.steps))
    rates = next((n for n in range(count) if _differ(one.lr(n), many.lr(n))), None)
    if (n := rates) is not None:
        seen = f"step {n + 1}: {_listed(one.lr(n))} on {one}, {_listed(many.lr(n))} on {many}"
        yield finding("worlds-lr", f"the learning rate on {many} is not that on {one}", at, seen)
    if one.first_weights != many.first_weights:
        names = [
            name for name, value in (one.first_weights or {}).items() if (many.first_weights or {}).get(name) != value
        ]
        yield finding(
            "worlds-weights", f"the first weights on {many} are not those on {one}", at, f"of {', '.join(names[:3])}"
        )
        return
    other = next((n for n in range(count) if one.samples(n) != many.samples(n)), None)
    if other is not None:
        yield _other_samples(one, many, other)
    if rates is not None:
        return
    for n in range(count if other is None else other):
        a, b = one.loss(n), many.loss(n)
        if a is not None and b is not None and _part(a, b, n):
            yield _other_loss(one, many, n)
            return


def _part(a: float, b: float, n: int) -> bool:
    return abs(a - b) > (_ROUNDING if n else _ROUNDING / 10) * max(abs(a), abs(b), 1e-6)


def _other_samples(one: _Run, many: _Run, n: int) -> Finding:
    a, b = one.samples(n), many.samples(n)
    at = next((start.at for start in many.trace.ranks[0].of(events.PassStart)), None)
    sizes = f"step {n + 1}: {a.total()} samples on {one}, {b.total()} on {many}, {(a & b).total()} of them the same"
    if a.total() != b.total():
        remedy = "the global batch is not the same: say how the script is told its batch size (--batch-arg)"
        return finding("worlds-samples", remedy, at, sizes)
    return finding("worlds-samples", f"step {n + 1} on {many} has other samples than on {one}", at, sizes)


def _other_loss(one: _Run, many: _Run, n: int) -> Finding:
    """The first step whose losses differ, with the cause as far as it is known."""
    at = many.trace.ranks[0].line(events.Backward)
    seen = [
        f"step {k + 1}: {one.loss(k):.6g} on {one}, {many.loss(k):.6g} on {many}" for k in range(max(0, n - 1), n + 1)
    ]
    norms = dict.fromkeys(name for _, buffers in many.trace.all(events.Buffers) for name in buffers.local_norms)
    if norms:
        what = "the loss differs, since BatchNorm uses the statistics of each rank alone"
        return finding("worlds-batch-norm", what, at, *seen, f"layers: {', '.join(norms)}")
    if _draws(many.trace):
        return finding("worlds-randomness", "the loss differs, and the script draws random numbers", at, *seen)
    if n == 0:
        what = "the loss of the first step differs: it is a mean of the ranks' means"
        return finding("worlds-loss", what, at, *seen)
    what = f"the loss is the same up to step {n} and differs from step {n + 1} on"
    return finding("worlds-update", what, at, *seen)


def _draws(trace: Trace) -> bool:
    """Whether training draws random numbers: in dropout, or by functions such as randn."""
    dropout = any(given.generator is not None for _, given in trace.all(events.ModelInput))
    return dropout or any(draw.step > 0 for _, draw in trace.all(events.RandomDraw))


def _agreement(one: _Run, many: _Run) -> str:
    count = min(len(one.steps), len(many.steps))
    pairs = [(a, b) for n in range(count) if (a := one.loss(n)) is not None and (b := many.loss(n)) is not None]
    if not pairs:
        return f"no loss is known on {one} and {many}: samples and learning rates agree over {count} steps"
    largest = max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)
    known = "" if all(step.samples for step in one.steps[0]) else " (which samples it saw is not known)"
    return f"over {len(pairs)} steps the losses on {one} and {many} differ by {largest:.1g} at most{known}"


def _differ(a: list[float], b: list[float]) -> bool:
    return len(a) != len(b) or any(not math.isclose(x, y, rel_tol=1e-6) for x, y in zip(a, b, strict=True))


def _listed(lr: list[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(lr))
