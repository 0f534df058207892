"""Spot checks of an exact run: another rank repeats a tile, and must get the same bits.

A device that computes wrongly without an error makes all replicas wrong alike: they agree on a wrong sum. But a tile
has the same bits on any rank. So in every n-th step each rank repeats one tile of another rank, and three comparisons
cover the way of a gradient from the samples to the weights:

    a tile          checksums of its gradients, and its loss: those of its rank, and those of the rank that repeats it
    the sum         checksums add up as gradients do: those of all tiles must give that of the sum over all ranks
    the replicas    weights, optimizer state and averages are equal on all ranks

Where two ranks disagree about a tile, all ranks repeat it. What most of them get is right; of two ranks, the one that
does not get again what it had is wrong. verdict.py decides.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batching import Batching, MicroBatch
from ..distributed import RunFailed, World
from ..exact import ExactSums, Numbered
from ..hashing import mix_words
from . import Watch
from .data import digest
from .drift import checksums
from .fingerprints import Fingerprints, add_checksums
from .repair import affects_training, copy_tensors
from .verdict import Checksums, Dispute, Fault, Report, judge, settle

ATTEMPTS = 3
"""How often a step is done again before its fault counts as one that does not go away."""
Repeat = Callable[[MicroBatch], tuple[Tensor, Numbered] | None]
"""Returns what a tile adds to the loss, and its gradients; None where memory does not suffice. Changes nothing."""


class Corruption(RunFailed):
    """A rank has computed wrongly, without any error of its own."""


class NotRepeatable(RunFailed):
    """The recipe or its data do not give the same twice, so the run is not exact."""


@dataclass(frozen=True)
class Schedule:
    """Which rank repeats which tile in which step. The steps are the same on any number of ranks."""

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

    def check_before(self, step: int) -> int | None:
        """Return the step of the check before this one; None if there are no steps in between that were not checked."""
        return step - self.every if self.every > 1 and step >= self.every else None

    def owner(self, tile: int) -> int:
        return next(rank for rank in range(self.batching.world) if tile in self.batching.own(rank))


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
        self._devices = world.broadcast(world.gather(f"{world.device} on {socket.gethostname()}"))
        self._repeated: MicroBatch | None = None
        self._attempts = 0
        self._skip_reported = False

    def repeats(self, step: int) -> list[int]:
        """Return the tiles of other ranks that this rank repeats in a step."""
        return self.schedule.repeats(step, self.world.rank)

    def start_step(self, step: int, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's own tiles of a step; in a step that is checked there is one of another rank too."""
        due = self.schedule.is_due(step)
        self.sums.observer = self.fingerprints if due else None
        self._repeated, self._attempts = (batches[0] if due else None), 0
        return batches[due:]

    def check(self, step: int, losses: Callable[[], list[Tensor]], repeat: Repeat) -> bool:
        """Return whether the step has to be done again. Between all-reduce and update; every rank calls this.

        `losses`: of each tile of this rank, what it adds to the loss.
        """
        if self._repeated is None:
            return False
        started = time.perf_counter()
        reports = self.world.gather(self._report(self._repeated, losses(), repeat))
        verdict = self.world.broadcast(judge(reports, self.names) if self.world.is_main else None)
        if isinstance(verdict, list):
            verdict = self._settle(step, verdict, reports, repeat)
        self._say_skipped(step, reports)
        self.watch.seconds += time.perf_counter() - started
        return verdict is not None and self._respond(step, verdict)

    def _report(self, micro: MicroBatch, losses: Sequence[Tensor], repeat: Repeat) -> Report:
        global_sum = torch.zeros_like(self.fingerprints.sums)
        add_checksums(self.sums.integers(), global_sum)
        own = zip(self.fingerprints.tiles.items(), losses, strict=True)
        tiles = {number: _join(found, loss) for (number, found), loss in own}
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
        return _join(found, loss)

    def _settle(self, step: int, disputed: list[int], reports: list[Report], repeat: Repeat) -> Fault:
        """Let all ranks repeat the tiles that two disagree about; return who was wrong."""
        batches = [self.fetch(step, tile) for tile in disputed]
        ranks = self.world.gather([(digest(micro.batch), self._result(micro, repeat)) for micro in batches])
        fault = None
        if self.world.is_main:
            again = [list(zip(*found, strict=True)) for found in zip(*ranks, strict=True)]
            claims = [self._claims(tile, reports) for tile in disputed]
            disputes = [
                Dispute(tile, claim, list(results), list(data))
                for tile, claim, (data, results) in zip(disputed, claims, again, strict=True)
            ]
            fault = settle(disputes, self.names)
        return self.world.broadcast(fault)

    def _claims(self, tile: int, reports: list[Report]) -> dict[int, Checksums]:
        """Return, by rank, what the two ranks that disagree about a tile got for it."""
        owner = self.schedule.owner(tile)
        checker, found = next((rank, r.repeated[1]) for rank, r in enumerate(reports) if r.repeated[0] == tile)
        assert found is not None
        return {owner: reports[owner].tiles[tile], checker: found}

    def _say_skipped(self, step: int, reports: list[Report]) -> None:
        """Say, once, that a tile was not compared; rank 0 has the reports."""
        starved = [rank for rank, report in enumerate(reports) if report.repeated[1] is None]
        if starved and not self._skip_reported:
            self._skip_reported = True
            ranks = ", ".join(map(str, starved))
            self.say(
                f"spot check at step {step + 1}: rank {ranks} has not enough memory to repeat a tile, which is not "
                "compared then; a smaller --batch_size leaves more"
            )

    def _respond(self, step: int, fault: Fault) -> bool:
        """Do what --on_corruption asks for; return whether the step has to be done again."""
        self.watch.corruptions += 1
        self._attempts += 1
        text, action = self._message(step, fault), self.watch.on_corruption
        if action == "warn":
            self.watch.record_break(f"step {step + 1}: {fault.text}; it was used all the same")
            self.say(f"{text}; training continues with it (--on_corruption warn)")
            return False
        if fault.in_recipe:
            raise NotRepeatable(f"{text} (--spot_check_every 0 turns spot checks off)")
        if action == "stop" or fault.sources is None or self._attempts > ATTEMPTS:
            raise Corruption(f"{text}; {self._remedy(step, action)}")
        copy_tensors(self.watch.replicated(True), fault.sources, self.world)
        before = self.schedule.check_before(step) if not fault.sources or affects_training(fault.sources) else None
        since = "" if before is None else f"; steps since the check at step {before + 1} may be wrong too"
        if since:
            self.watch.record_break(f"step {step + 1}: {fault.text}{since}")
        copied = ", ".join(f"{name} from rank {rank}" for name, rank in list(fault.sources.items())[:3])
        self.say(f"{text}; {f'copied {copied}; ' if copied else ''}the step is done again{since}")
        return True

    def _message(self, step: int, fault: Fault) -> str:
        what = "the run is not exact" if fault.in_recipe else "silent data corruption"
        devices = "".join(f"; rank {rank} is {self._devices[rank]}" for rank in fault.ranks)
        return f"{what} at step {step + 1}: {fault.text}{devices}"

    def _remedy(self, step: int, action: str) -> str:
        again = f"it was the same in {self._attempts} attempts; " if self._attempts > 1 else ""
        before = self.schedule.check_before(step)
        source = (
            "the last checkpoint" if before is None else f"a checkpoint of step {before + 1} or before (--resume PATH)"
        )
        why = "" if before is None else f"steps since the check at step {before + 1} may be wrong too; "
        heal = "" if action == "heal" else "; --on_corruption heal repeats such a step instead"
        return f"{again}{why}resume from {source}, without that device if it happens again{heal}"


def _join(found: Tensor, loss: Tensor) -> Checksums:
    return torch.cat([found, loss.view(torch.int64)]).cpu().numpy()
