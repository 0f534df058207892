"""Scripts that start their ranks themselves: here they are started already, and this process is one of them."""

import os
import sys
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ..trace import Recorder, foreign
from .patch import Function, Patches


def start_ranks_here(patches: Patches, recorder: Recorder) -> None:
    """`torch.multiprocessing.spawn` runs its function in this process, as the rank that it is. Processes that a script
    starts one by one are only written down: some are no ranks. And wherever ranks are told to meet, they meet here."""

    def spawning(original: Function) -> Function:
        def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            recorder.write("spawn", nprocs=nprocs)
            rank = int(os.environ["RANK"])
            if rank < nprocs:
                fn(rank, *args)
            return SimpleNamespace(join=lambda *_: True, processes=[])

        return spawn

    def starting(original: Function) -> Function:
        def start(process: BaseProcess) -> None:
            if not recorder.in_worker and not foreign(sys._getframe(1).f_code.co_filename):
                recorder.write("process")
            original(process)

        return start

    here = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}

    def meeting(original: Function) -> Function:
        def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
            if str(init_method).startswith("tcp://"):
                init_method = f"tcp://{here['MASTER_ADDR']}:{here['MASTER_PORT']}"
            with recorder.hide():
                os.environ.update(here)
            original(backend, init_method, *args, **kwargs)

        return init_process_group

    patches.wrap(torch.multiprocessing, "spawn", spawning)
    patches.wrap(BaseProcess, "start", starting)
    patches.wrap(dist, "init_process_group", meeting)
