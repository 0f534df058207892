"""Scripts that start their ranks themselves: here they are started already, and this process is one of them."""

import os
from types import SimpleNamespace
from typing import Any

import torch.multiprocessing

from ..trace import Recorder
from .patch import Function, Patches


def start_ranks_here(patches: Patches, recorder: Recorder) -> None:
    """`torch.multiprocessing.spawn` runs its function in this process, as the rank that it is."""

    def watched(original: Function) -> Function:
        def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            recorder.write("spawn", nprocs=nprocs)
            fn(int(os.environ["RANK"]), *args)
            return SimpleNamespace(join=lambda *_: True, processes=[])

        return spawn

    patches.wrap(torch.multiprocessing, "spawn", watched)
