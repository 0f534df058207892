"""The checks inside every run: replicas are equal, each sample is used once per epoch, all ranks are at one step."""

import time
from typing import Any

from torch import Tensor

from ..distributed import RunFailed, World
from ..stream import Slice
from .agreement import disagreement
from .drift import checksums, differing
from .ledger import Ledger, tally_epochs


class OutOfLockstep(RunFailed):
    """The ranks no longer train one model on one stream of data."""


class Watch:
    """Compares the ranks whenever values are logged; in between it costs nothing."""

    def __init__(self, world: World, weights: dict[str, Tensor], dataset: int):
        self.world, self.weights = world, weights
        self.ledger = Ledger(dataset)
        self.seconds = 0.0
        """Time spent on checks so far."""

    def check(self, step: int, used: list[Slice], **facts: Any) -> None:
        """Raise OutOfLockstep on all ranks if they differ in weights or `facts`, or a sample was not used once.

        `used`: the samples that went through this rank's model since the last check.
        """
        started = time.perf_counter()
        own = {"weights": checksums(self.weights), "facts": {"step": step, **facts}, "used": tally_epochs(used)}
        ranks = self.world.gather(own)
        problem = self.world.broadcast(self._problem(step, ranks) if self.world.is_main else None)
        self.seconds += time.perf_counter() - started
        if problem:
            raise OutOfLockstep(problem)

    def _problem(self, step: int, ranks: list[dict[str, Any]]) -> str | None:
        facts = [rank["facts"] for rank in ranks]
        if found := disagreement(facts):
            name, other = found
            return f"at step {step} {name} is {facts[0][name]} on rank 0 but {facts[other][name]} on rank {other}"
        difference = differing([rank["weights"] for rank in ranks])
        if difference:
            name, count, rank = difference
            return f"at step {step} the weights of rank {rank} are not those of rank 0: {count} tensors, first {name}"
        return self.ledger.post([rank["used"] for rank in ranks])
