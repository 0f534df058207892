"""Scripts that start their ranks themselves: here they are started already, and this process is one of them."""

import dis
import inspect
import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from types import CellType, ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ..events import InitGroup, ProcessStarted, RankStarted, Spawn
from ..recorder import Recorder
from ..source import foreign
from .patch import Function, Patches

_DEPTH = 4
"""How far functions that call one another are followed."""


def start_ranks_here(patches: Patches, recorder: Recorder) -> None:
    """What a script would start as its ranks runs in the ranks that there are, and wherever they are told to meet, they
    meet on this machine."""
    rank = int(os.environ["RANK"])
    meetings = count(int(os.environ["MASTER_PORT"]), 7)
    ranks: list[Any] = []
    round_ = _Round()

    def spawning(original: Function) -> Function:
        def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
            if dist.is_initialized():  # the ranks are there: these are to help one of them
                return original(fn, args, nprocs, *rest, **kwargs)
            recorder.write(Spawn(nprocs))
            if rank < nprocs:
                fn(rank, *args)
            return SimpleNamespace(join=lambda *_, **__: True, processes=[])

        return spawn

    def starting(original: Function) -> Function:
        def start(process: Any) -> None:
            own = not recorder.in_worker and not foreign(sys._getframe(1).f_code.co_filename)
            task = process._target if type(process).run is BaseProcess.run else process.run
            known = any(_function(task) is one for one in ranks)
            if own and (known or (not dist.is_initialized() and _joins(task))):
                ranks.append(_function(task))
                _never_starts(process, round_)
                number = round_.next()
                recorder.write(RankStarted(number + 1))
                if number == rank:
                    process.run()
                return
            if own:
                recorder.write(ProcessStarted())
            original(process)

        return start

    def meeting(original: Function) -> Function:
        def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
            if not recorder.in_worker:
                world = kwargs.get("world_size", args[1] if len(args) > 1 else -1)
                recorder.write(InitGroup(world if isinstance(world, int) else -1))
                port = next(meetings)  # one for each: at the last one some may still be leaving
                with recorder.hide():  # this is no setting of the script's
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                if str(init_method).startswith("tcp://"):
                    init_method = f"tcp://127.0.0.1:{port}"
            original(backend, init_method, *args, **kwargs)

        return init_process_group

    for name in ("spawn", "start_processes"):
        patches.wrap(torch.multiprocessing, name, spawning)
    patches.wrap(BaseProcess, "start", starting)
    patches.wrap(dist, "init_process_group", meeting)


class _Round:
    """Processes that are started one after the other, until one of them is waited for."""

    def __init__(self) -> None:
        self.started, self.is_over = 0, False

    def next(self) -> int:
        if self.is_over:
            self.started, self.is_over = 0, False
        self.started += 1
        return self.started - 1

    def end(self, *_: Any) -> int:
        self.is_over = True
        return 0


def _never_starts(process: Any, round_: _Round) -> None:
    """Let a Process be one that has ended well, for whoever joins it, asks for its status or ends it."""
    nothing = {name: lambda *_, **__: None for name in ("terminate", "kill", "close")}
    process._popen = SimpleNamespace(wait=round_.end, poll=lambda *_: 0, returncode=0, pid=None, **nothing)
    process._sentinel, end = os.pipe()
    os.close(end)


def _joins(task: Any, owner: Any = None, depth: int = _DEPTH) -> bool:
    """Whether a function, or one of the user's that it calls, joins a process group: others feed or serve the ranks."""
    function = _function(task)
    if function is inspect.unwrap(dist.init_process_group):
        return True
    code = getattr(function, "__code__", None)
    if code is None or foreign(code.co_filename):
        return False
    if "init_process_group" in code.co_names:
        return True
    owner = getattr(_whole(task), "__self__", owner)
    return depth > 0 and any(_joins(called, owner, depth - 1) for called in _called(function, owner))


def _whole(task: Any) -> Any:
    """What a partial function is a part of."""
    while isinstance(task, partial):
        task = task.func
    return task


def _function(task: Any) -> Any:
    """What runs when a task is called: of a class its __init__, of an object its __call__."""
    task = _whole(task)
    if isinstance(task, type):
        task = task.__init__  # type: ignore[misc]
    elif callable(task) and not hasattr(getattr(task, "__func__", task), "__code__"):
        task = type(task).__call__
    return inspect.unwrap(getattr(task, "__func__", task)) if callable(task) else task


def _called(function: Any, owner: Any) -> Iterator[Any]:
    """What a function names that can be called: of its globals, of functions around it, of modules, of the object that
    it belongs to; of classes all that they have, since what it does with their objects is not followed."""
    code, thing = function.__code__, None
    around = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            thing = function.__globals__.get(step.argval)
        elif step.opname == "LOAD_DEREF" and step.argval in around:
            thing = _content(around[step.argval])
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(thing, ModuleType):
            thing = getattr(thing, step.argval, None)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and thing is not None and thing is owner:
            thing = inspect.getattr_static(owner, step.argval, None)
        elif step.opname.startswith("LOAD_FAST") and code.co_argcount and step.argval == code.co_varnames[0]:
            thing = owner
        else:
            thing = None
        if isinstance(thing, type):
            yield from (f for f in vars(thing).values() if inspect.isfunction(f))
        elif callable(thing) and thing is not owner:
            yield thing


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
