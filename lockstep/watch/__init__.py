"""The checks inside every run: replicas are equal, each sample is used once per epoch, all ranks are at one step.

And all ranks see the same data.
"""

import time
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ..distributed import World
from ..stream import Slice
from .agreement import OutOfLockstep, disagreement, minority
from .data import DataWatch
from .drift import checksums, differing
from .ledger import Ledger, tally_epochs
from .repair import affects_training, copy_tensors, find_sources
from .times import Times

__all__ = ["OutOfLockstep", "Watch"]


class Watch:
    """Compares the ranks whenever values are logged; in between it costs nothing."""

    def __init__(
        self,
        world: World,
        replicated: Callable[[bool], dict[str, Tensor]],
        ledger: Ledger,
        data: DataWatch,
        on_corruption: Literal["stop", "heal", "warn"] = "stop",
        record: Callable[[str], None] = lambda _: None,
    ):
        self.world, self.on_corruption, self._record = world, on_corruption, record
        self.corruptions = 0
        """How often a rank was found to have computed wrongly or to hold other tensors."""
        self.replicated = replicated
        """replicated(everything): the tensors that must be equal on every rank, or of them only the model's."""
        self.ledger, self.data = ledger, data
        self.seconds = 0.0
        """Time spent on checks so far."""
        self.times: list[Times] = []
        """On rank 0: of each rank, the times that came with the last check."""

    def check(
        self, step: int, used: list[Slice], everything: bool = False, times: Times | None = None, **facts: Any
    ) -> list[str]:
        """Raise OutOfLockstep on all ranks if they differ in `replicated` or `facts`, or a sample was not used once.

        Tensors that differ are healed, or only reported, where `on_corruption` says so. Now and then a sample's content
        is compared too; what is noticed without being an error is returned.
        `used`: the samples that went through this rank's model since the last check; not counted where the size of an
        epoch is not known. `everything`: compare averages and optimizer state too, which takes several times as long.
        `times`: of this rank since the last check.
        """
        started = time.perf_counter()
        own = {
            "tensors": checksums(self.replicated(everything)),
            "facts": {"step": step, **facts},
            "used": tally_epochs(used) if self.ledger.size else {},
            "times": times or Times(),
        }
        ranks = self.world.gather(own)
        self.times = [rank["times"] for rank in ranks]
        verdict = (self._problems(step, ranks), self.data.choose(step)) if self.world.is_main else None
        (disagreement, drift, misuse), places = self.world.broadcast(verdict)
        if disagreement:
            raise OutOfLockstep(disagreement)
        notes = [self._respond(step, drift)] if drift else []
        if misuse:
            raise OutOfLockstep(misuse)
        notes += self.data.compare(places) if places else []
        self.seconds += time.perf_counter() - started
        return notes

    def _respond(self, step: int, drift: str) -> str:
        """Do what --on_corruption asks for, and return a note; OutOfLockstep if that is to stop."""
        self.corruptions += 1
        if self.on_corruption == "warn":
            self.record_break(f"step {step}: the ranks do not hold the same tensors")
            return f"{drift}; --on_corruption warn: training continues"
        if self.on_corruption == "heal" and (sources := self._sources()):
            copy_tensors(self.replicated(True), sources, self.world)
            if self._sources() != {}:  # what an optimizer keeps as a Python number cannot be copied into
                raise OutOfLockstep(drift)
            if affects_training(sources):
                self.record_break(
                    f"step {step}: a rank held other tensors; steps since the check before have used them"
                )
            return f"{drift}; {len(sources)} copied from rank {min(sources.values())}, training continues"
        raise OutOfLockstep(drift)

    def record_break(self, why: str) -> None:
        """Keep in checkpoints from what step on the run is not what it would have been; the first reason is enough."""
        self._record(why)
        self._record = lambda _: None

    def _sources(self) -> dict[str, int] | None:
        """Return a rank to copy each tensor from that is not equal on all ranks."""
        ranks = self.world.gather(checksums(self.replicated(True)))
        return self.world.broadcast(find_sources(ranks) if self.world.is_main else None)

    def _problems(self, step: int, ranks: list[dict[str, Any]]) -> tuple[str | None, str | None, str | None]:
        """Return how the ranks differ in facts, how in tensors, and what is wrong with the samples used."""
        return self._disagreement(step, ranks), self._drift(step, ranks), self.ledger.post([r["used"] for r in ranks])

    def _disagreement(self, step: int, ranks: list[dict[str, Any]]) -> str | None:
        facts = [rank["facts"] for rank in ranks]
        if found := disagreement(facts):
            name, other = found
            return f"at step {step} {name} is {facts[0][name]} on rank 0 but {facts[other][name]} on rank {other}"
        return None

    def _drift(self, step: int, ranks: list[dict[str, Any]]) -> str | None:
        tensors = [rank["tensors"] for rank in ranks]
        if difference := differing(tensors):
            name, count, _ = difference
            wrong = minority([rank.get(name) for rank in tensors])
            numbers = ", ".join(map(str, wrong))
            which = f"those of rank {numbers} are not those of the others" if wrong else "no majority shows which"
            return f"at step {step} the ranks no longer hold the same tensors: {count} differ, first {name}; {which}"
        return None
