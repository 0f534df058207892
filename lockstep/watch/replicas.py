"""The weights that a script trains are equal on all ranks: compared beside the script, without a collective.

The thread that trains computes checksums after a step, as it does everything else. A thread of each rank posts them in
the store of the process group, and that of rank 0 compares them. So nothing waits for another rank, and ranks that
make different numbers of steps are no worse off.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..distributed import World
from .agreement import OutOfLockstep, minority
from .drift import PendingChecksums, start_checksums
from .models import assign_names, held_by_ddp, replicated, root_modules, sharded_parameters

_PATIENCE = 10.0
"""Seconds that the end of a script waits for the last comparison."""


@dataclass
class _Comparison:
    step: int
    parameters: list[Tensor]
    sums: PendingChecksums
    ready: torch.cuda.Event | None
    """When the device has computed them."""


class Replicas:
    """Compares the parameters that optimizers train. `say`: prints a line."""

    def __init__(self, world: World, on_corruption: Literal["stop", "warn"], say: Callable[[str], None]):
        assert world.store is not None
        self.world, self.on_corruption, self.say = world, on_corruption, say
        self._store = dist.PrefixStore("replicas", world.store.clone())  # type: ignore[attr-defined]
        self.compared: list[int] = []
        """On rank 0: the steps after which the weights were equal."""
        self._failure: str | None = None
        self._ended_at: int | None = None
        """The step at which comparing has ended because another rank did not answer."""
        self._apart, self._warned = False, False
        """Whether each rank trains weights of its own that no DDP holds; whether a difference was reported."""
        self._searched, self._sharded, self._held = -1, set[int](), set[int]()
        self._names: dict[int, str] = {}
        self._queue: queue.SimpleQueue[_Comparison | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lockstep-replicas", daemon=True)
        self._thread.start()

    def start(self, step: int, parameters: list[Tensor]) -> None:
        """Begin to compare parameters as they are now; neither the device nor another rank is waited for."""
        if self._ended_at is not None:
            return
        if len(parameters) != self._searched:  # the search takes a tenth of a second
            self._searched = len(parameters)
            self._search()
        ordered = sorted(parameters, key=lambda p: self._names.get(id(p), ""))  # a script may collect them in a set
        pairs = [(p, replicated(p)) for p in ordered if id(p) not in self._sharded]
        whole = [(p, tensor) for p, tensor in pairs if tensor is not None]
        if not whole:
            return
        sums, ready = start_checksums({str(i): tensor for i, (_, tensor) in enumerate(whole)}), None
        if any(tensor.is_cuda for _, tensor in whole):
            ready = torch.cuda.Event()
            ready.record()
        self._queue.put(_Comparison(step, [parameter for parameter, _ in whole], sums, ready))

    def _search(self) -> None:
        """Find out about the models, which may be gone when a difference is known."""
        self._sharded, self._held = sharded_parameters(), held_by_ddp(self.world.size)
        assign_names(root_modules(), self._names)

    def raise_failure(self) -> None:
        """Raise OutOfLockstep on rank 0 if the weights were found to differ."""
        if self._failure is not None:
            raise OutOfLockstep(self._failure)

    def finish(self) -> None:
        """Wait for the last comparison, and raise what it has found."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)
        self.raise_failure()
        if self._ended_at is not None:
            self.say(f"weights were not compared from step {self._ended_at} on: another rank did not make that step")

    def _run(self) -> None:
        while (comparison := self._queue.get()) is not None:
            try:
                self._exchange(comparison)
            except Exception:  # the store is gone, or another rank has not come to this step: nothing to compare
                self._ended_at = comparison.step
                return

    def _exchange(self, comparison: _Comparison) -> None:
        if comparison.ready is not None:
            comparison.ready.synchronize()
        own = np.array(list(comparison.sums.read().values()), np.uint64)
        if not self.world.is_main:
            self._store.set(f"{comparison.step}/{self.world.rank}", own.tobytes())  # type: ignore[arg-type]
            return
        keys = [f"{comparison.step}/{rank}" for rank in range(1, self.world.size)]
        tables = [own, *(np.frombuffer(self._store.get(key), np.uint64) for key in keys)]
        for key in keys:
            self._store.delete_key(key)
        self._judge(comparison, tables)

    def _judge(self, comparison: _Comparison, tables: list[NDArray[np.uint64]]) -> None:
        """Report parameters that differ: those that DDP holds, and others if they have been equal before."""
        if all(np.array_equal(np.sort(table), np.sort(tables[0])) for table in tables):  # in any order
            if not self._apart:
                self.compared.append(comparison.step)
            return
        if len({len(table) for table in tables}) > 1:
            counts = ", ".join(str(len(table)) for table in tables)
            self._warn_of_parts(f"the ranks train different numbers of parameters ({counts})")
            return
        different = np.flatnonzero(np.any([table != tables[0] for table in tables], axis=0)).tolist()
        wrong = [i for i in different if id(comparison.parameters[i]) in self._held]
        if not wrong and not self.compared:
            count = f"{len(different)} of {len(tables[0])} parameters"
            self._warn_of_parts(f"the ranks hold different weights after step {comparison.step}: {count}")
            return
        if wrong or not self._apart:
            self._fail(comparison, wrong or different, tables)

    def _warn_of_parts(self, text: str) -> None:
        if not self._apart:
            self._apart = True
            self.say(
                f"{text}, and no DDP over all ranks holds them. That is right if each rank is to train a model or a "
                "part of its own; otherwise wrap the model in DistributedDataParallel"
            )

    def _fail(self, comparison: _Comparison, wrong: list[int], tables: list[NDArray[np.uint64]]) -> None:
        first = self._names.get(id(comparison.parameters[wrong[0]]), "a tensor of no module")
        ranks = ", ".join(map(str, minority([int(table[wrong[0]]) for table in tables])))
        whose = f"those of rank {ranks} are not those of the others" if ranks else "no majority shows which are wrong"
        text = (
            f"after step {comparison.step} the ranks no longer hold the same weights: {len(wrong)} of {len(tables[0])} "
            f"parameters differ, first {first}; {whose}. `lockstep audit` finds the line that is the cause"
        )
        if self.on_corruption == "stop":
            self._failure = self._failure or text
        elif not self._warned:
            self._warned = True
            self.say(f"{text}; --on_corruption warn: training continues")
