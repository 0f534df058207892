"""The checks inside every run: replicas agree, each sample is used once an epoch, all ranks are at the same place."""

import time
from typing import Any

from torch import Tensor

from ..distributed import World
from .agreement import disagreement
from .drift import checksums, differing
from .ledger import Ledger


class OutOfLockstep(RuntimeError):
    """The ranks no longer train one model on one stream of data."""


class Watch:
    """Compares the ranks whenever values are logged; in between it costs nothing."""

    def __init__(self, world: World, weights: dict[str, Tensor], dataset: int):
        self.world, self.weights = world, weights
        self.ledger = Ledger(dataset)
        self.seconds = 0.0
        """Time spent on checks so far."""

    def check(self, step: int, **facts: Any) -> None:
        """Stop the run on all ranks if they do not agree on the weights, on `facts` or on the samples used."""
        start = time.perf_counter()
        mine = {"weights": checksums(self.weights), "facts": {"step": step, **facts}, "used": self.ledger.collect()}
        ranks = self.world.gather(mine)
        wrong = self.world.broadcast(self._verdict(step, ranks) if self.world.is_main else None)
        self.seconds += time.perf_counter() - start
        if wrong:
            raise OutOfLockstep(wrong)

    def _verdict(self, step: int, ranks: list[dict[str, Any]]) -> str | None:
        facts = [rank["facts"] for rank in ranks]
        if found := disagreement(facts):
            name, other = found
            return f"at step {step} {name} is {facts[0][name]} on rank 0 but {facts[other][name]} on rank {other}"
        difference = differing([rank["weights"] for rank in ranks])
        if difference:
            name, count, rank = difference
            return f"at step {step} the weights of rank {rank} are not those of rank 0: {count} tensors, first {name}"
        return self.ledger.post([rank["used"] for rank in ranks])
