"""Real processes with gloo, started once for a world and used by many tests.

def work(world: World, x: int) -> int: ...           # a function of a test module
ranks(3)(work, 7) -> [result of rank 0, of rank 1, of rank 2]
"""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from processes import SERVER

from lockstep.audit.launcher import free_port


def _serve(rank: int, size: int, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # what it was forked from has that of its own start
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    import torch

    from lockstep.distributed import connect, disconnect

    torch.set_num_threads(1)
    world = connect("cpu", timeout=120)
    while (task := pipe.recv()) is not None:
        module, name, arguments = task
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(world, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
        gc.collect()
    disconnect(world)


class Ranks:
    """A world of processes that wait for work."""

    def __init__(self, size: int):
        self.size, port = size, free_port()
        self.whole = True
        """Until a test fails on it: what its ranks then have sent and not received would be in the way of the next."""
        sys.path.insert(0, str(Path(__file__).parents[1]))
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(rank, size, port, theirs, dict(os.environ)), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((work.__module__, work.__name__, arguments))
        whole, self.whole = self.whole, False
        answers = [pipe.recv() for pipe in self.pipes]
        for rank, (fine, answer) in enumerate(answers):
            assert fine, f"rank {rank}: {answer}"
        self.whole = whole
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # it has ended
                pipe.send(None)
        for process in self.processes:
            process.join(20 if self.whole else 0)
            if process.is_alive():
                process.kill()
