"""A rank that is slower than the others: which one, and how much of everyone's time is lost by waiting for it.

A rank's own time in a step runs from the start of the step until its last gradient is ready; what it then waits for is
other ranks. On a GPU two events measure it, read when values are logged. Time in collectives before that point (terms
of a loss, SyncBatchNorm) is left out on a CPU; on a GPU it hides a slow rank, except for its time waiting for data.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from ..distributed import World

SLOWER = 0.2
"""A rank is a straggler from this much more time per step than the median of the others."""
LOST = 0.05
"""And from this share of all time that is lost by waiting for it."""


class StepTime(NamedTuple):
    """Seconds of one step on one rank."""

    own: float
    data: float
    """Of these, waiting for the loader."""
    communication: float = 0.0
    """Summing gradients, as far as it is not hidden behind the backward pass; waiting for slower ranks."""
    update: float = 0.0
    """What comes after: optimizer, schedule, averages."""


class StepTimes:
    """This rank's times in each step since the last log."""

    def __init__(self, world: World):
        self.activity, self.on_gpu = world.activity, world.device.type == "cuda" and world.size > 1
        self._times: list[StepTime] = []
        self._events: list[list[torch.cuda.Event]] = []
        """Of each step: its start, gradients ready, gradients summed, its end."""
        self._started = 0.0
        self._ready: float | None = None
        self._summed: float | None = None
        self._data = self._waited = 0.0
        """Time spent waiting for data and in collectives, when the step started."""
        self._waited_at_ready = 0.0

    def start(self) -> None:
        """Mark the start of a step."""
        self._started, self._data = time.perf_counter(), self.activity.data_seconds
        self._ready = self._summed = None
        self._waited = self._waited_at_ready = self.activity.wait_seconds
        if self.on_gpu:
            timed = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            for event in timed:
                event.record()
            self._events.append(timed)

    def gradients_ready(self) -> None:
        """Mark that gradients were handed to an all-reduce; the last time in a step counts. DDP's hook calls this."""
        self._ready = time.perf_counter()
        self._waited_at_ready = self.activity.wait_seconds
        if self._events:
            self._events[-1][1].record()

    def gradients_summed(self) -> None:
        """Mark that the gradients of all ranks have been added up."""
        self._summed = time.perf_counter()
        if self._events:
            self._events[-1][2].record()

    def finish(self) -> None:
        """Add up the step that has just ended."""
        now = time.perf_counter()
        ready = now if self._ready is None else self._ready
        summed = ready if self._summed is None else max(ready, self._summed)
        waited = self._waited_at_ready - self._waited
        own = ready - self._started - waited
        data = self.activity.data_seconds - self._data
        self._times.append(StepTime(own, data, summed - ready + waited, now - summed))
        if self._events:
            self._events[-1][3].record()

    def collect(self) -> list[StepTime]:
        """Return the times since the last call; the GPU must have finished the steps."""
        times, events, self._times, self._events = self._times, self._events, [], []
        if not self.on_gpu:
            return times
        found = []
        for marks, host in zip(events, times, strict=True):
            own, communication, update = (a.elapsed_time(b) / 1000 for a, b in pairwise(marks))
            found.append(StepTime(own, host.data, max(0.0, communication), max(0.0, update)))
        return found


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of a log interval."""

    rank: int
    seconds: float
    """Per step, more than the median of the others."""
    others: float
    """Own time of the others per step, their median."""
    share: float
    """Of all time of the interval, lost by waiting for it."""
    by_data: bool
    """Whether it is its loader that is slow."""

    def __str__(self) -> str:
        cause = "it waits for data" if self.by_data else "its own computation takes longer"
        return (
            f"rank {self.rank} is slower than the others: {1000 * self.seconds:.0f} ms more per step than their "
            f"{1000 * self.others:.0f} ms ({cause}); {self.share:.0%} of the time is lost by waiting for it"
        )


def find_straggler(ranks: Sequence[Sequence[StepTime]], seconds: float) -> Straggler | None:
    """Return the slowest of several ranks, if it is a straggler; `seconds`: how long the interval was for all."""
    if len(ranks) < 2 or not all(ranks):
        return None
    typical = [StepTime(median(t.own for t in times), median(t.data for t in times)) for times in ranks]
    found = max((_compare(typical, rank) for rank in range(len(ranks))), key=lambda s: s.seconds)
    share = min(1.0, found.seconds * len(ranks[0]) / max(seconds, 1e-9))
    if found.seconds <= SLOWER * found.others or share < LOST:
        return None
    return Straggler(found.rank, found.seconds, found.others, share, found.by_data)


def _compare(typical: list[StepTime], rank: int) -> Straggler:
    others = [time for number, time in enumerate(typical) if number != rank]
    own, data = median(time.own for time in others), median(time.data for time in others)
    more, more_data = typical[rank].own - own, typical[rank].data - data
    return Straggler(rank, max(more, more_data), own, 0.0, more_data > max(more, more_data) / 2)


class Stragglers:
    """The stragglers of successive log intervals."""

    def __init__(self) -> None:
        self._rank, self._in_a_row = -1, 0

    def check(self, ranks: Sequence[Sequence[StepTime]], seconds: float) -> tuple[dict[str, float], str | None]:
        """Return the values to log of a straggler, and a message the second time in a row that it is the same rank."""
        found = find_straggler(ranks, seconds)
        if found is None:
            self._rank, self._in_a_row = -1, 0
            return {}, None
        self._in_a_row = self._in_a_row + 1 if found.rank == self._rank else 1
        self._rank = found.rank
        message = str(found) if self._in_a_row == 2 else None
        return {"straggler": found.rank, "straggler_lost_share": found.share}, message
