"""Scripts that start their ranks themselves: here they are started already, and this process is one of them."""

import inspect
import os
import sys
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ..trace import Recorder, foreign
from .patch import Function, Patches

_DEPTH = 4
"""How far functions that call one another are followed."""


def start_ranks_here(patches: Patches, recorder: Recorder) -> None:
    """What a script would start as its ranks runs in the ranks that there are, and wherever they are told to meet, they
    meet on this machine."""
    rank = int(os.environ["RANK"])
    started, meetings = count(), count(int(os.environ["MASTER_PORT"]), 7)
    ranks: set[Any] = set()

    def spawning(original: Function) -> Function:
        def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            recorder.write("spawn", nprocs=nprocs)
            if rank < nprocs:
                fn(rank, *args)
            return SimpleNamespace(join=lambda *_, **__: True, processes=[])

        return spawn

    def starting(original: Function) -> Function:
        def start(process: Any) -> None:
            own = not recorder.in_worker and not foreign(sys._getframe(1).f_code.co_filename)
            task = process._target if type(process).run is BaseProcess.run else type(process).run
            if own and (task in ranks or (not dist.is_initialized() and _joins(task))):
                ranks.add(task)
                _never_starts(process)
                if next(started) == rank:
                    process.run()
                return
            if own:
                recorder.write("process")
            original(process)

        return start

    def meeting(original: Function) -> Function:
        def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
            if not recorder.in_worker:
                port = next(meetings)  # one for each: at the last one some may still be leaving
                with recorder.hide():  # this is no setting of the script's
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                if str(init_method).startswith("tcp://"):
                    init_method = f"tcp://127.0.0.1:{port}"
            original(backend, init_method, *args, **kwargs)

        return init_process_group

    patches.wrap(torch.multiprocessing, "spawn", spawning)
    patches.wrap(BaseProcess, "start", starting)
    patches.wrap(dist, "init_process_group", meeting)


def _never_starts(process: Any) -> None:
    """Let a Process be one that has ended well, for whoever joins it, asks for its status or ends it."""
    nothing = {name: lambda *_, **__: None for name in ("terminate", "kill", "close")}
    process._popen = SimpleNamespace(wait=lambda *_: 0, poll=lambda *_: 0, returncode=0, pid=None, **nothing)
    process._sentinel, end = os.pipe()
    os.close(end)


def _joins(task: Any, depth: int = _DEPTH) -> bool:
    """Whether a function, or one of the user's that it calls, joins a process group: others feed or serve the ranks."""
    while isinstance(task, partial):
        task = task.func
    task = inspect.unwrap(getattr(task, "__func__", task)) if callable(task) else None
    code = getattr(task, "__code__", None)
    if code is None or foreign(code.co_filename):
        return False
    called = [task.__globals__.get(name) for name in code.co_names]
    return "init_process_group" in code.co_names or any(depth and _joins(f, depth - 1) for f in called if callable(f))
