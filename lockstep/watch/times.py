"""Where the time of a run goes, rank by rank: waiting for data, computing, communicating, and between the steps.

    times.jsonl   {"step": 40, "seconds": 12.5, "ranks": [{"data": 0.1, "computation": 11.0, ...}, ...]}

The numbers travel with the check of replicas at each log. When the loader or the communication holds training back,
that is said, at most once a minute. On a GPU the host runs ahead of the device, and waits for it when values are
logged; that wait is part of the computation.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import activity
from ..cores import available_cores
from ..distributed import World
from ..files import StepLines
from ..loader import default_workers
from .stragglers import StepTime, StepTimes, Stragglers

FILE = "times.jsonl"
DATA, COMPUTATION, COMMUNICATION, UPDATE = "data", "computation", "communication", "optimizer"
_STEPS = (activity.FIRST_STEP, activity.STEP)
BETWEEN_ADVICE = 60.0
"""Seconds between two messages about what holds training back."""
SLOW_DATA, SLOW_COMMUNICATION = 0.1, 0.4
"""Shares of the time of steps from which something is said."""


class Times(NamedTuple):
    """What one rank reports of the time since the last log."""

    steps: Sequence[StepTime] = ()
    phases: Mapping[str, float] = {}
    """Seconds by phase."""

    def by_kind(self, on_gpu: bool) -> dict[str, float]:
        """Return the seconds by kind of work; those of a step, then the phases between steps."""
        found = Counter(self.phases)
        total = sum(found.pop(name, 0.0) for name in (*_STEPS, *((activity.LOGGING,) if on_gpu else ())))
        data, communication, update = (
            sum(getattr(t, n) for t in self.steps) for n in ("data", COMMUNICATION, "update")
        )
        computation = max(0.0, total - data - communication - update)
        in_steps = {DATA: data, COMPUTATION: computation, COMMUNICATION: communication, UPDATE: update}
        return {name: seconds for name, seconds in (in_steps | found).items() if seconds > 0}


class TimeUse:
    """Measures the time of this rank and, on rank 0, writes down that of all ranks."""

    def __init__(self, world: World, folder: Path, resumed_step: int, num_workers: int | None):
        self.world, self.steps = world, StepTimes(world)
        workers = default_workers(world.device) if num_workers is None else num_workers
        self._stragglers, self._advice = Stragglers(), Advice(workers, cores_per_rank())
        self._last = world.activity.seconds()
        self._lines = StepLines(folder / FILE, resumed_step) if world.is_main else None

    def collect(self) -> Times:
        """Return the times of this rank since the last call; the GPU must have finished the steps."""
        now = self.world.activity.seconds()
        phases = {name: seconds - self._last.get(name, 0.0) for name, seconds in now.items()}
        self._last = now
        return Times(self.steps.collect(), phases)

    def record(self, step: int, ranks: Sequence[Times], seconds: float) -> tuple[dict[str, float], list[str]]:
        """Write down the times of all ranks; return the values to log, and messages about what is slow."""
        if self._lines is None or not ranks:
            return {}, []
        kinds = [rank.by_kind(self.world.device.type == "cuda") for rank in ranks]
        rounded = [{name: round(value, 4) for name, value in rank.items()} for rank in kinds]
        with suppress(OSError):  # tried again with the next line
            self._lines.append({"step": step, "seconds": round(seconds, 4), "ranks": rounded})
        values, straggler = self._stragglers.check([rank.steps for rank in ranks], seconds)
        advice = self._advice.add(kinds, bool(values))
        return values | {"data_wait_share": share(kinds, DATA)}, [note for note in (straggler, advice) if note]

    def finish(self, step: int) -> None:
        """Write down what all ranks have done since the last log; at the end of a run, on every rank."""
        self.record(step, self.world.gather(self.collect()), 0.0)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def share(ranks: Sequence[Mapping[str, float]], kind: str) -> float:
    """Return the largest share that a kind of work has of any rank's steps."""
    return max((rank.get(kind, 0.0) / max(_of_steps(rank), 1e-9) for rank in ranks), default=0.0)


def _of_steps(rank: Mapping[str, float]) -> float:
    return sum(rank.get(name, 0.0) for name in (DATA, COMPUTATION, COMMUNICATION, UPDATE))


class Advice:
    """What to change when data or communication holds training back; said at most once a minute."""

    def __init__(self, num_workers: int, cores: int):
        self.num_workers, self.cores = num_workers, cores
        self._ranks: list[Counter[str]] = []

    def add(self, ranks: Sequence[Mapping[str, float]], has_straggler: bool = False) -> str | None:
        """Count another interval; return a message when a minute of steps has been counted and something is slow."""
        self._ranks = self._ranks or [Counter() for _ in ranks]
        for total, rank in zip(self._ranks, ranks, strict=True):
            total.update({name: rank.get(name, 0.0) for name in (DATA, COMPUTATION, COMMUNICATION, UPDATE)})
        if max(map(_of_steps, self._ranks)) < BETWEEN_ADVICE:
            return None
        counted, self._ranks = self._ranks, []
        if share(counted, DATA) >= SLOW_DATA:
            return self._about_data(counted)
        if not has_straggler and min(r[COMMUNICATION] / _of_steps(r) for r in counted) >= SLOW_COMMUNICATION:
            waiting = share(counted, COMMUNICATION)
            return (
                f"the ranks spend {waiting:.0%} of their time on summing gradients: a larger --batch_size or "
                "--gradient_accumulation_steps makes fewer sums, fewer ranks may be as fast"
            )
        return None

    def _about_data(self, ranks: Sequence[Counter[str]]) -> str:
        shares = [rank[DATA] / _of_steps(rank) for rank in ranks]
        worst = max(range(len(ranks)), key=lambda number: shares[number])
        everyone = len(ranks) > 1 and min(shares) > shares[worst] / 2
        who = "each rank waits" if everyone else f"rank {worst} waits" if len(ranks) > 1 else "training waits"
        said = f"{who} {shares[worst]:.0%} of its time for data"
        workers = workers_for(shares[worst], self.num_workers)
        if workers > self.cores:
            return f"{said}, and {self.cores} cores per rank do not suffice to prepare it: make its samples cheaper"
        return f"{said}: --num_workers {workers}"


def cores_per_rank() -> int:
    """Return how many cores of this machine each of its ranks can use."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def workers_for(waiting: float, workers: int) -> int:
    """Return how many loader processes it takes, where `workers` leave this share of the time waiting."""
    busy = max(1.0 - waiting, 0.01)
    needed = workers / busy if workers else waiting / busy  # without workers, samples are made between the steps
    return max(workers + 1, int(needed + 0.999))
