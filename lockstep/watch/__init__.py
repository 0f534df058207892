"""The checks inside every run: replicas are equal, each sample is used once per epoch, all ranks are at one step.

And all ranks see the same data.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..distributed import World
from ..stream import Slice
from .agreement import OutOfLockstep, disagreement, minority
from .data import DataWatch
from .drift import checksums, differing
from .ledger import Ledger, tally_epochs
from .stragglers import StepTime

__all__ = ["OutOfLockstep", "Watch"]


class Watch:
    """Compares the ranks whenever values are logged; in between it costs nothing."""

    def __init__(self, world: World, replicated: Callable[[bool], dict[str, Tensor]], ledger: Ledger, data: DataWatch):
        self.world = world
        self.replicated = replicated
        """replicated(everything): the tensors that must be equal on every rank, or of them only the model's."""
        self.ledger, self.data = ledger, data
        self.seconds = 0.0
        """Time spent on checks so far."""
        self.step_times: list[Sequence[StepTime]] = []
        """On rank 0: of each rank, the times that came with the last check."""

    def check(
        self, step: int, used: list[Slice], everything: bool = False, times: Sequence[StepTime] = (), **facts: Any
    ) -> list[str]:
        """Raise OutOfLockstep on all ranks if they differ in `replicated` or `facts`, or a sample was not used once.

        Now and then a sample's content is compared too; what is noticed without being an error is returned.
        `used`: the samples that went through this rank's model since the last check. `everything`: compare averages and
        optimizer state too, which takes several times as long. `times`: for `step_times`.
        """
        started = time.perf_counter()
        own = {
            "tensors": checksums(self.replicated(everything)),
            "facts": {"step": step, **facts},
            "used": tally_epochs(used),
            "times": list(times),
        }
        ranks = self.world.gather(own)
        self.step_times = [rank["times"] for rank in ranks]
        verdict = (self._problem(step, ranks), self.data.choose(step)) if self.world.is_main else None
        problem, places = self.world.broadcast(verdict)
        if problem:
            raise OutOfLockstep(problem)
        notes = self.data.compare(places) if places else []
        self.seconds += time.perf_counter() - started
        return notes

    def _problem(self, step: int, ranks: list[dict[str, Any]]) -> str | None:
        facts = [rank["facts"] for rank in ranks]
        if found := disagreement(facts):
            name, other = found
            return f"at step {step} {name} is {facts[0][name]} on rank 0 but {facts[other][name]} on rank {other}"
        tensors = [rank["tensors"] for rank in ranks]
        if difference := differing(tensors):
            name, count, _ = difference
            wrong = minority([rank.get(name) for rank in tensors])
            numbers = ", ".join(map(str, wrong))
            which = f"those of rank {numbers} are not those of the others" if wrong else "no majority shows which"
            return f"at step {step} the ranks no longer hold the same tensors: {count} differ, first {name}; {which}"
        return self.ledger.post([rank["used"] for rank in ranks])
