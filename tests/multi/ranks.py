"""Real processes with gloo, started once for a world and used by many tests.

def work(world: World, x: int) -> int: ...           # a function of a test module
ranks(3)(work, 7) -> [result of rank 0, of rank 1, of rank 2]
"""

import gc
import importlib
import multiprocessing
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from processes import environment

from lockstep.audit.launcher import free_port


def serve(address: str, key: str) -> None:
    """Be a rank: do what comes over the connection, one task after the other."""
    multiprocessing.current_process().authkey = bytes.fromhex(key)  # with which tensors are sent
    import torch

    from lockstep.distributed import connect, disconnect

    world = connect("cpu", timeout=120)
    pipe = Client(address)
    pipe.send(world.rank)
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
        self.size, port = size, str(free_port())
        self.whole = True
        """Until a test fails on it: what its ranks then have sent and not received would be in the way of the next."""
        group = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with tempfile.TemporaryDirectory() as folder, Listener(str(Path(folder) / "socket")) as listener:
            key = multiprocessing.current_process().authkey.hex()
            code = f"from multi.ranks import serve; serve({listener.address!r}, {key!r})"
            self.processes = [
                subprocess.Popen(["python", "-c", code], env=environment(RANK=str(r), LOCAL_RANK=str(r), **group))
                for r in range(size)
            ]
            accepted = [listener.accept() for _ in range(size)]
        pipes = {pipe.recv(): pipe for pipe in accepted}
        self.pipes: list[Connection] = [pipes[rank] for rank in range(size)]

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
            with suppress(subprocess.TimeoutExpired):
                process.wait(20 if self.whole else 0)
            process.kill()
