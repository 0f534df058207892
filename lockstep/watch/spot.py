"""Spot checks of an exact run: another rank repeats a tile, and must get the same bits.

A device that computes wrongly without an error makes all replicas wrong alike: they agree on a wrong sum. But a tile
has the same bits on any rank. So in every n-th step each rank repeats one tile of another rank, and three comparisons
cover the way of a gradient from the samples to the weights:

    a tile          the checksum of its gradient and its loss: those of its rank, and those of the rank that repeats it
    the sum         checksums add up as gradients do: those of all tiles must give that of the sum over all ranks
    the replicas    weights, optimizer state and averages are equal on all ranks

Where two ranks disagree about a tile, all ranks repeat it. What most of them get is right; of two ranks, the one that
does not get again what it had is wrong.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batching import Batching, MicroBatch
from ..distributed import RunFailed, World
from ..exact import ExactSums, Numbered
from ..hashing import mix_words
from . import Watch
from .agreement import minority
from .drift import checksums, differing
from .fingerprints import Fingerprints, add_checksums
from .repair import affects_training, copy_tensors, find_sources

TILES_PER_CHECK = 200
"""By default a rank repeats one tile for so many of its own: 0.5 % more work."""
ATTEMPTS = 3
"""How often a step is done again before its fault counts as one that does not go away."""
Checksums = NDArray[np.int64]
Repeat = Callable[[MicroBatch], tuple[Tensor, Numbered] | None]
"""Runs a tile without leaving anything behind: its loss and gradients, or None where memory does not suffice."""


class Corruption(RunFailed):
    """A rank has computed wrongly, without any error of its own."""


@dataclass(frozen=True)
class Schedule:
    """Which rank repeats which tile in which step."""

    every: int
    batching: Batching
    seed: int

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def tile(self, step: int, rank: int) -> int:
        """Return the tile that `rank` repeats in `step`. Every rank is checked; by each of the others in turn."""
        others = self.batching.world - 1
        owner = (rank + 1 + step // self.every % others) % self.batching.world
        own = self.batching.own(owner)
        return own[mix_words(self.seed, step, owner) % len(own)]

    def repeats(self, step: int, rank: int) -> list[int]:
        return [self.tile(step, rank)] if self.is_due(step) else []

    def owner(self, tile: int) -> int:
        return next(rank for rank in range(self.batching.world) if tile in self.batching.own(rank))


@dataclass
class Report:
    """What one rank knows about a step."""

    repeated: tuple[int, Checksums | None]
    """A tile of another rank, and what this rank got for it: a checksum for each parameter, and the loss."""
    tiles: dict[int, Checksums]
    """The same of its own tiles."""
    own_sum: Checksums
    """Of its gradients, added up over its tiles, right before they are summed over the ranks."""
    global_sum: Checksums
    """Of the sum over all ranks, as this rank has received it."""
    fits: bool
    """Whether its gradients fit the grid; where some do not, integers have no right sum, and the step is redone."""
    state: dict[str, int]
    """A checksum of each tensor that must be equal on all ranks."""


@dataclass
class Fault:
    """What is wrong in a step: `text` goes on after "at step N"."""

    text: str
    sources: dict[str, int] | None = field(default_factory=dict)
    """Of each tensor that is to be copied, the rank that has the right one; None if no majority shows which."""
    undecided: bool = False
    """Whether it could be either of two ranks."""


def judge(reports: Sequence[Report], names: Sequence[str]) -> Fault | list[int] | None:
    """Return what is wrong, or the tiles about which two ranks disagree; None if there is nothing."""
    if difference := differing([report.state for report in reports]):
        name, count, _ = difference
        wrong = minority([report.state.get(name) for report in reports])
        whose = f"rank {_join(wrong)} holds" if wrong else "no majority shows which rank holds"
        text = f"{whose} wrong weights, optimizer state or averages: {count} tensor(s) differ, first {name}"
        return Fault(text, find_sources([report.state for report in reports]))
    tiles = {number: found for report in reports for number, found in report.tiles.items()}
    repeated = [(tile, found) for tile, found in (report.repeated for report in reports) if found is not None]
    if disputed := [tile for tile, found in repeated if not np.array_equal(found, tiles[tile])]:
        return disputed
    return _judge_sums(reports, names) if all(report.fits for report in reports) else None


def _judge_sums(reports: Sequence[Report], names: Sequence[str]) -> Fault | None:
    own_sums = [np.sum(list(report.tiles.values()), 0)[:-1] for report in reports]
    for rank, (report, expected) in enumerate(zip(reports, own_sums, strict=True)):
        if not np.array_equal(report.own_sum, expected):
            where = _first_difference(report.own_sum, expected, names)
            return Fault(f"rank {rank} has added up the gradients of its tiles wrongly, first {where}")
    expected = np.sum(own_sums, 0)
    wrong = [rank for rank, report in enumerate(reports) if not np.array_equal(report.global_sum, expected)]
    if not wrong:
        return None
    where = _first_difference(reports[wrong[0]].global_sum, expected, names)
    if len(wrong) == len(reports):
        return Fault(f"the sum of gradients over all ranks is wrong on the way between them, first {where}")
    return Fault(f"rank {_join(wrong)} has received a wrong sum of gradients, first {where}")


def settle(
    tile: int,
    first: Mapping[int, Checksums],
    again: Sequence[Checksums | None],
    names: Sequence[str],
) -> Fault:
    """Return who was wrong about a tile: `first` has what two ranks got, `again` what all ranks get now."""
    results = [None if found is None else found.tobytes() for found in again]
    before = {rank: found.tobytes() for rank, found in first.items()}
    given = [result for result in results if result is not None]
    right = next((r for r in given if 2 * given.count(r) > len(given)), None)
    if right is not None:
        wrong = {rank for rank, result in enumerate(results) if result not in (right, None)}
        wrong |= {rank for rank, result in before.items() if result != right}
    else:
        wrong = {rank for rank, result in before.items() if results[rank] != result}
    a, b = first.values()
    where = f"tile {tile}, first in {_first_difference(a, b, names)}"
    if len(wrong) == 1 or (wrong and right is not None):
        return Fault(f"rank {_join(sorted(wrong))} has computed wrongly: {where}")
    either = _join(sorted(first), " or ")
    return Fault(f"rank {either} has computed wrongly, no third rank shows which: {where}", undecided=True)


def _first_difference(a: Checksums, b: Checksums, names: Sequence[str]) -> str:
    return [*(f"the gradient of {name}" for name in names), "the loss"][int(np.flatnonzero(a != b)[0])]


def _join(ranks: Sequence[int], word: str = ", ") -> str:
    return word.join(map(str, ranks))


class SpotChecks:
    """The spot checks of a run, seen from one rank."""

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        sums: ExactSums,
        watch: Watch,
        names: Sequence[str],
        fetch: Callable[[int, int], MicroBatch],
        say: Callable[[str], None],
    ):
        """`names`: of the parameters. `fetch(step, tile)` brings any tile to this rank's device."""
        self.schedule, self.world, self.sums, self.watch, self.names = schedule, world, sums, watch, names
        self.fetch, self.say = fetch, say
        self.fingerprints = Fingerprints(len(names), world.device)
        self._repeated: MicroBatch | None = None
        self._attempts = 0

    def repeats(self, step: int) -> list[int]:
        """Return the tiles of other ranks that this rank repeats in a step."""
        return self.schedule.repeats(step, self.world.rank)

    def start_step(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's own tiles of a step; in a step that is checked there is one of another rank too."""
        due = self.schedule.is_due(step)
        self.sums.observer = self.fingerprints if due else None
        self._repeated, self._attempts = (batches[0] if due else None), 0
        return batches[due:]

    def check(self, step: int, losses: Sequence[Tensor], repeat: Repeat) -> bool:
        """Return whether the step has to be done again. Between all-reduce and update; every rank calls this."""
        if self._repeated is None:
            return False
        started = time.perf_counter()
        reports = self.world.gather(self._report(self._repeated, losses, repeat))
        verdict = self.world.broadcast(judge(reports, self.names) if self.world.is_main else None)
        if isinstance(verdict, list):
            verdict = self._settle(step, verdict, reports, repeat)
        self.watch.seconds += time.perf_counter() - started
        return verdict is not None and self._respond(step, verdict)

    def _report(self, micro: MicroBatch, losses: Sequence[Tensor], repeat: Repeat) -> Report:
        global_sum = torch.zeros_like(self.fingerprints.sums)
        add_checksums(self.sums.integers(), global_sum)
        own = zip(self.fingerprints.tiles.items(), losses, strict=True)
        tiles = {number: _with_loss(found, loss) for (number, found), loss in own}
        own_sum, fits = self.fingerprints.sums.cpu().numpy(), bool(self.sums.fits())
        state = checksums(self.watch.replicated(True))
        return Report(
            (micro.number, self._result(micro, repeat)), tiles, own_sum, global_sum.cpu().numpy(), fits, state
        )

    def _result(self, micro: MicroBatch, repeat: Repeat) -> Checksums | None:
        """Return the checksums that this rank gets for a tile."""
        if (repeated := repeat(micro)) is None:
            return None
        loss, gradients = repeated
        found = torch.zeros_like(self.fingerprints.sums)
        add_checksums(gradients, found, self.sums.scales)
        return _with_loss(found, loss)

    def _settle(self, step: int, disputed: list[int], reports: list[Report], repeat: Repeat) -> Fault:
        """Let all ranks repeat the tiles that two disagree about; return who was wrong."""
        own = {tile: self._result(self.fetch(step, tile), repeat) for tile in disputed}
        ranks = self.world.gather(own)
        fault = None
        if self.world.is_main:
            faults = [settle(t, self._claims(t, reports), [r[t] for r in ranks], self.names) for t in disputed]
            # A rank that is wrong is wrong as owner of one tile and as checker of another: once is enough.
            fault = min(faults, key=lambda fault: fault.undecided)
        return self.world.broadcast(fault)

    def _claims(self, tile: int, reports: list[Report]) -> dict[int, Any]:
        """Return, by rank, what the two ranks that disagree about a tile got for it."""
        owner = self.schedule.owner(tile)
        checker = next(rank for rank, report in enumerate(reports) if report.repeated[0] == tile)
        return {owner: reports[owner].tiles[tile], checker: reports[checker].repeated[1]}

    def _respond(self, step: int, fault: Fault) -> bool:
        """Do what --on_corruption asks for; return whether the step has to be done again."""
        self.watch.corruptions += 1
        text, action = f"silent data corruption at step {step + 1}: {fault.text}", self.watch.on_corruption
        self._attempts += 1
        if action == "warn":
            self.watch.record(f"step {step + 1}: {fault.text}; it was used all the same")
            self.say(f"{text}; --on_corruption warn: training continues with it")
            return False
        if action == "stop" or fault.sources is None or self._attempts > ATTEMPTS:
            again = f", in {self._attempts} attempts" if self._attempts > 1 else ""
            raise Corruption(
                f"{text}{again}; resume from the last checkpoint, without that device if it happens again "
                "(--on_corruption heal repeats such a step)"
            )
        copy_tensors(self.watch.replicated(True), fault.sources)
        if self.schedule.every > 1 and affects_training(fault.sources):
            self.watch.record(f"step {step + 1}: {fault.text}; steps since the check before may have used it")
        copied = ", ".join(f"{name} from rank {rank}" for name, rank in list(fault.sources.items())[:3])
        self.say(f"{text}; {f'copied {copied}; ' if copied else ''}the step is done again")
        return True


def _with_loss(found: Tensor, loss: Tensor) -> Checksums:
    return torch.cat([found, loss.detach().double().reshape(1).view(torch.int64)]).cpu().numpy()
