"""Scripts that start their ranks themselves: here they are started already, and this process is one of them."""

import inspect
import os
import sys
from itertools import count
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ..trace import Recorder, foreign
from .patch import Function, Patches

_ENDED = SimpleNamespace(wait=lambda *_: 0, poll=lambda *_: 0, returncode=0, pid=None, sentinel=None)
"""What a Process that never ran holds, so that it can be joined and has a status."""


def start_ranks_here(patches: Patches, recorder: Recorder) -> None:
    """What a script would start as its ranks runs in the ranks that there are, and wherever they are told to meet, they
    meet on this machine."""
    rank = int(os.environ["RANK"])
    started, meetings = count(), count(int(os.environ["MASTER_PORT"]))

    def spawning(original: Function) -> Function:
        def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            recorder.write("spawn", nprocs=nprocs)
            if rank < nprocs:
                fn(rank, *args)
            return SimpleNamespace(join=lambda *_: True, processes=[])

        return spawn

    def starting(original: Function) -> Function:
        def start(process: Any) -> None:
            own = not recorder.in_worker and not foreign(sys._getframe(1).f_code.co_filename)
            if own and _is_rank(process):
                process._popen = _ENDED
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
                with recorder.hide():
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                if str(init_method).startswith("tcp://"):
                    init_method = f"tcp://127.0.0.1:{port}"
            original(backend, init_method, *args, **kwargs)

        return init_process_group

    patches.wrap(torch.multiprocessing, "spawn", spawning)
    patches.wrap(BaseProcess, "start", starting)
    patches.wrap(dist, "init_process_group", meeting)


def _is_rank(process: Any) -> bool:
    """Whether a Process is to join a group, by the source of its function: others feed or serve the ranks."""
    try:
        return not dist.is_initialized() and "init_process_group" in inspect.getsource(process._target)
    except (OSError, TypeError):
        return False
