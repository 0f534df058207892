"""Scripts that start their ranks themselves: the audit has started them already, and this process is one of them."""

import dis
import inspect
import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from types import CellType, ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ..events import InitGroup, ProcessStarted, RanksStarted
from ..patch import Arguments, Function, Patches
from ..recorder import Recorder
from ..source import caller, foreign

_MAX_CALL_DEPTH = 4


def install(recorder: Recorder, patches: Patches) -> None:
    """Run what the script would start as its ranks in the ranks that exist; every process group is on this machine."""
    spawner = _Spawner(recorder)
    for name in ("spawn", "start_processes"):
        patches.intercept(torch.multiprocessing, name, spawner.spawn)
    patches.intercept(BaseProcess, "start", spawner.start)
    patches.edit_arguments(dist, "init_process_group", spawner.init_process_group)


class _Spawner:
    """Replaces the ways to start ranks; numbers the processes that are started one by one, from 0 after each join."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.rank, self.world = recorder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.ports = count(int(os.environ["MASTER_PORT"]), 7)
        self.rank_functions: list[Any] = []
        self.started, self.joined = 0, False

    def spawn(self, original: Function, fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        if dist.is_initialized():  # these processes assist a rank, such as to prepare data
            return original(fn, args, nprocs, *rest, **kwargs)
        self.recorder.write(RanksStarted(nprocs))
        if self.rank < nprocs:
            fn(self.rank, *args)
        return SimpleNamespace(join=lambda *_, **__: True, processes=[])

    def start(self, original: Function, process: Any) -> None:
        if self.recorder.in_worker or foreign(caller().file):
            original(process)
        elif self._is_rank(process):
            self._run_rank(process)
        else:
            self.recorder.write(ProcessStarted())
            original(process)

    def _is_rank(self, process: Any) -> bool:
        task = _task(process)
        known = any(_function(task) is function for function in self.rank_functions)
        return known or (not dist.is_initialized() and _joins_group(task))

    def _run_rank(self, process: Any) -> None:
        """Run the process here if it has this rank; to the script it is one that has exited with status 0."""
        self.rank_functions.append(_function(_task(process)))
        ignored = {name: lambda *_, **__: None for name in ("terminate", "kill", "close")}
        process._popen = SimpleNamespace(wait=self._join, poll=lambda *_: 0, returncode=0, pid=None, **ignored)
        process._sentinel, write_end = os.pipe()
        os.close(write_end)
        if self.joined:
            self.started, self.joined = 0, False
        self.started += 1
        self.recorder.write(RanksStarted(self.started))
        if self.started - 1 == self.rank:
            process.run()

    def _join(self, *_: Any) -> int:
        self.joined = True
        return 0

    def init_process_group(self, arguments: Arguments) -> None:
        if self.recorder.in_worker:
            return
        given = arguments.get("world_size")
        in_environment = int(os.environ.get("WORLD_SIZE", self.world))
        world = given if isinstance(given, int) else in_environment if in_environment != self.world else -1
        self.recorder.write(InitGroup(world))
        if world > self.world:  # it would wait for ranks that are not there
            raise RuntimeError(f"a group of {world} ranks, and {self.world} are there: lockstep audit --nproc {world}")
        port = next(self.ports)  # a new one for each group: ranks may still be leaving the last
        with self.recorder.hide():  # not a setting of the script
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if str(arguments.get("init_method")).startswith("tcp://"):
            arguments["init_method"] = f"tcp://127.0.0.1:{port}"


def _task(process: Any) -> Any:
    """Return what a process runs: its target, or the `run` of its class."""
    return process._target if type(process).run is BaseProcess.run else process.run


def _joins_group(task: Any, owner: Any = None, depth: int = _MAX_CALL_DEPTH) -> bool:
    """Whether a function, or a function of the user that it calls, joins a process group: then it is a rank."""
    function = _function(task)
    if function is inspect.unwrap(dist.init_process_group):
        return True
    code = getattr(function, "__code__", None)
    if code is None or foreign(code.co_filename):
        return False
    if "init_process_group" in code.co_names:
        return True
    owner = getattr(_without_partial(task), "__self__", owner)
    return depth > 0 and any(_joins_group(called, owner, depth - 1) for called in _callees(function, owner))


def _without_partial(task: Any) -> Any:
    while isinstance(task, partial):
        task = task.func
    return task


def _function(task: Any) -> Any:
    """Return the function that runs when a task is called: of a class its __init__, of an object its __call__."""
    task = _without_partial(task)
    if isinstance(task, type):
        task = task.__init__  # type: ignore[misc]
    elif callable(task) and not hasattr(getattr(task, "__func__", task), "__code__"):
        task = type(task).__call__
    return inspect.unwrap(getattr(task, "__func__", task)) if callable(task) else task


def _callees(function: Any, owner: Any) -> Iterator[Any]:
    """Yield the callables that a function names: globals, closure variables, attributes of modules and of `owner`, the
    object it is a method of; of a class all methods, since calls on its instances are not followed."""
    code, cells = function.__code__, function.__closure__ or ()
    variables = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    named = [owner, *(function.__globals__.get(name) for name in variables)]
    named += [cell.cell_contents for cell in cells if cell != CellType()]  # not one that is still empty
    for value in named:  # it grows: a module may hold a module
        if value is owner or isinstance(value, ModuleType):
            attributes = (inspect.getattr_static(value, name, None) for name in code.co_names if name not in variables)
            named += [found for found in attributes if all(found is not known for known in named)]
        if isinstance(value, type):
            yield from (f for f in vars(value).values() if inspect.isfunction(f))
        elif callable(value) and value is not owner:
            yield value
