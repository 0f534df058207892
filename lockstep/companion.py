"""One rank of `lockstep run`: a script that knows nothing of it, with a watch for hangs and for weights that differ.

The script makes its own process group. The watch uses the store of torchrun's agent, never a collective. What it needs
to know, hooks tell it: that of optimizers (steps, and which parameters are trained) and that of loaders (batches).
"""

import importlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from . import activity, agent, distributed, rendezvous, script
from .distributed import RunFailed, World
from .options import RunScript
from .watch.hang import HangWatch
from .watch.replicas import Replicas

_TIMEOUT = 600.0
_EARLY = (1, 2, 5, 10, 20)
"""Steps after which weights are compared in any case: most mistakes show at once."""
_BUSY = 0.02
"""The share of a core's time above which a process computes."""


def run(words: list[str], options: RunScript) -> int:
    """Run the script as this rank and return its exit status; what ends it is raised as RunFailed."""
    world = _observe()
    if not sys.flags.safe_path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]  # `python -m lockstep` put it there; the script has a folder of its own
    watch = ScriptWatch(world, options)
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        watch.say(
            f"a rank has failed; all ranks were started again ({restarts} of {os.environ['TORCHELASTIC_MAX_RESTARTS']})"
        )
    hangs = HangWatch(
        world, Path(), options.hang_timeout, inf, ends_process=world.size > 1, busy=watch.is_computing
    )  # fmt: skip
    with hangs, watch.hooks():
        status = _execute(words)
    if status == 0:
        watch.finish()
    else:
        distributed.record_cause(f"the script ended with exit status {status}")
    return status


def _observe() -> World:
    """Return this rank's world, without a process group: that is for the script to make."""
    missing = [name for name in distributed.ENVIRONMENT if name not in os.environ]
    if missing or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("RANK is set, but not by torchrun: start lockstep run without it, or by torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent.start_monitor()
    with rendezvous.explained(_TIMEOUT):
        rendezvous.choose_interface()
        store = rendezvous.open_store(rank, size, _TIMEOUT)
    if rank == 0:
        store.set("script", uuid.uuid4().hex)
    _prefix_store_of_script(store.get("script").decode())
    if size > 1:
        distributed.follow_failures(store, _TIMEOUT)
    return World(rank, size, int(os.environ["LOCAL_RANK"]), store=store)


def _prefix_store_of_script(prefix: str) -> None:
    """Let the script's process group have keys of its own: torchrun's agent keeps its store when ranks are restarted.

    With those of processes that have exited, gloo connects to ports where nobody listens.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def rendezvous_under_prefix(*args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        for store, rank, size in original(*args, **kwargs):
            yield dist.PrefixStore(prefix, store), rank, size

    handlers["env"] = rendezvous_under_prefix


def _execute(words: list[str]) -> int:
    """Return the exit status of the script, as Python would end with it."""
    try:
        script.run_as_main(words)
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise RunFailed(str(end.code)) from None
    except RunFailed:
        raise
    except Exception as error:
        if (lost := distributed.lost_contact(error)) and "too long" not in lost:
            raise  # the cause is on another rank
        raise RunFailed.of(error, _of_script(error.__traceback__)) from None
    return 0


def _of_script(behind: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the lines that start the script."""
    ours = (__file__, script.__file__, "<frozen runpy>")
    while behind is not None and behind.tb_frame.f_code.co_filename in ours:
        behind = behind.tb_next
    return behind


class ScriptWatch:
    """Tells the hang watch what a script does, and compares the weights that it trains."""

    def __init__(self, world: World, options: RunScript):
        self.world, self.options = world, options
        self.steps = 0
        """Of the first optimizer that has made one: the clock of the script."""
        self._optimizers = WeakKeyDictionary[Optimizer, None]()
        self._running: list[Optimizer] = []
        """Optimizers in the middle of a step: ZeRO's has another one inside, which holds a part of the weights."""
        self._cpu_seconds = 0.0
        compares = world.size > 1 and options.check_every > 0
        self._replicas = Replicas(world, options.on_corruption, self.say) if compares else None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow optimizers and loaders in the block."""
        removed = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
            _wrap_next(self._load),
        ]
        try:
            yield
        finally:
            for remove in removed:
                remove()

    def finish(self) -> None:
        """Raise what the last comparison has found, or say how often the weights were equal."""
        if self._replicas is None:
            return
        self._replicas.finish()
        if compared := self._replicas.compared:
            times = "once" if len(compared) == 1 else f"{len(compared)} times, last after step {compared[-1]}"
            self.say(f"{self.world.size} ranks, {self.steps} optimizer steps; weights compared {times}: equal")

    def is_computing(self, elapsed: float) -> bool:
        """Return whether this rank has used a processor in the last seconds, and not to wait for its GPU."""
        now = self.world.activity
        if now.phase == activity.START_UP and dist.is_available() and dist.is_initialized():
            now.enter(activity.FIRST_STEP)
        before, self._cpu_seconds = self._cpu_seconds, _cpu_seconds()
        if self._cpu_seconds - before < _BUSY * elapsed:
            return False
        device = self.world.device
        return device.type != "cuda" or torch.cuda.default_stream(device).query()

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.world.is_main:
            with suppress(OSError):
                sys.stderr.write(f"lockstep: {text}\n")
                sys.stderr.flush()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if optimizer in self._running:  # its last step was left by an exception
            del self._running[self._running.index(optimizer) :]
        self._running.append(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._running[:1] != [optimizer]:
            return
        self._running.clear()
        self._optimizers.setdefault(optimizer, None)
        if optimizer is not next(iter(self._optimizers)):
            self.world.activity.marks += 1
            return
        self.steps += 1
        self.world.activity.finish_step(self.steps, on_gpu=False)
        if self._replicas is not None:
            self._replicas.raise_failure()
            if self.steps in _EARLY or self.steps % self.options.check_every == 0:
                self._compare(self._replicas)

    def _compare(self, replicas: Replicas) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = list({id(p): p for group in groups for p in group["params"]}.values())
        if any(p.is_cuda for p in parameters):
            if torch.cuda.is_current_stream_capturing():
                return
            self.world.device = next(p.device for p in parameters if p.is_cuda)
        replicas.start(self.steps, parameters)

    def _load(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        now = self.world.activity
        now.loads_data = True
        try:
            return original(iterator)
        finally:
            now.loads_data = False
            now.marks += 1


def _wrap_next(around: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """Call `around(original, iterator)` for each batch of a DataLoader; return what undoes that."""
    kind: Any = dataloader._BaseDataLoaderIter
    original = kind.__next__
    kind.__next__ = lambda iterator: around(original, iterator)

    def undo() -> None:
        kind.__next__ = original

    return undo


def _cpu_seconds() -> float:
    """Return the processor time of this process and its children, such as a loader's."""
    import psutil  # a tenth of the time to import lockstep

    found = time.process_time()
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                found += sum(child.cpu_times()[:2])
    return found
