"""The process group: who we are, on which device, and how ranks agree.

`session` makes the group from the environment that torchrun (or a debugger, or a scheduler) sets, and takes it down
again. Without that environment the world has one rank and every method here does the plain thing.
"""

import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Hardware

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAILED = "lockstep/failed"
_failures: dist.Store | None = None


class Unreachable(ValueError):
    """This rank cannot meet the others. Each machine may have a reason of its own."""


@dataclass
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    control: dist.ProcessGroup | None = None
    """A gloo group of its own for small messages between the hosts; never waits for a device."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Added up over all ranks, in place, on the tensor's device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values or []

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers. A message between hosts: the devices go on with what they have."""
        if self.size == 1:
            return number
        ballot = torch.tensor([number], dtype=torch.int32)
        dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.control)
        return int(ballot.item())

    def decide(self, act: Callable[[], Any]) -> Any:
        """Rank 0 acts, every rank gets the result; what rank 0 finds wrong is wrong on all of them."""
        result, error = None, None
        if self.is_main:
            try:
                result = act()
            except ValueError as wrong:
                error = str(wrong)
        result, error = self.broadcast((result, error))
        if error is not None:
            raise ValueError(error)
        return result

    def barrier(self) -> None:
        """Wait for all ranks; the one that is late is named when the time is up."""
        if self.control is not None:
            dist.monitored_barrier(self.control, wait_all_ranks=True)


def first_to_fail() -> bool:
    """Whether no other rank has failed before: only the first failure is worth the user's eyes."""
    if _failures is None:  # before ranks know each other they mostly find the same thing wrong
        if os.environ.get("LOCAL_RANK", "0") != "0":
            threading.Event().wait(20)  # the launcher ends all at the first exit: let the one who speaks be that
        return True  # and it is still here: nobody was ended, so perhaps nobody has spoken
    try:
        first = _failures.add(_FAILED, 1) == 1
    except Exception:  # the store died with the process that failed first
        return False
    if not first:
        threading.Event().wait(2)  # again: let the one who speaks be the first to end
    return first


def lost_contact(error: Exception) -> str | None:
    """In plain words, if what failed is the talk between ranks: the cause is elsewhere, a stack trace would mislead."""
    text = str(error)
    if not isinstance(error, dist.DistError | RuntimeError):
        return None
    if any(sign in text for sign in ("imed out", "imeout")):
        return f"waited too long for another rank (--timeout): {text.splitlines()[0]}"
    gone = ("onnection closed", "onnection reset", "ocket closed", "roken pipe", "remote process exited")
    if any(sign in text for sign in gone):
        return "lost contact with another rank, which has ended"
    return None


class Signals:
    """Ctrl-C and a scheduler's signals, taken as a wish to stop after the step. A second one ends the process."""

    KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ONE_WISH = 1.0
    """Seconds within which signals count as one: a scheduler may reach a rank directly and through its launcher."""

    def __init__(self) -> None:
        self.received, self._since = 0, 0.0
        """The number of the first one that came."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for kind in self.KINDS:
                self._before[kind] = signal.signal(kind, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.received and time.monotonic() - self._since > self.ONE_WISH:
            os._exit(128 + number)
        if not self.received:
            self.received, self._since = number, time.monotonic()


@contextmanager
def session(hardware: Hardware) -> Iterator[World]:
    """The world, from first contact to a clean end."""
    world = connect(hardware)
    yield world
    disconnect(world)  # not after an exception: to wait for the others then would be to hang with them


def connect(hardware: Hardware) -> World:
    """Join the process group that the environment describes, or be a world of one."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World(device=pick_device(hardware, 0))
    missing = [name for name in ENVIRONMENT if name not in os.environ and name != "LOCAL_RANK"]
    if missing:
        raise ValueError(f"RANK or WORLD_SIZE is set but not {', '.join(missing)}; torchrun sets them all")
    local_rank = int(os.environ.get("LOCAL_RANK", hardware.local_rank or 0))
    device = pick_device(hardware, local_rank)
    timeout = timedelta(seconds=hardware.timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    nccl_device = device if device.type == "cuda" else None
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        store = _muster(store, rank, size, hardware.timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=nccl_device
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise Unreachable(_explain(error, where, hardware.timeout)) from None
    control = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    world = World(rank, size, local_rank, device, "nccl" if device.type == "cuda" else "gloo", control)
    if size > 1:
        global _failures
        _failures = store
        _keep_watch(store.clone())  # type: ignore[attr-defined]
    return world


def _muster(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """A part of the store that only those who are here now know of.

    torchrun's agent keeps its store when workers are restarted or a node joins; nodes do not even agree on how often
    that has happened. So rank 0 makes up a name for this meeting and tells it to whoever calls, until all have
    answered by that name: what the dead have left in the store answers nothing.
    """
    if rank > 0:
        caller = uuid.uuid4().hex
        store.set(f"lockstep/caller/{rank}", caller)
        meeting = store.get(f"lockstep/meeting/{caller}").decode()
        store.set(f"lockstep/{meeting}/here/{rank}", "")
        return dist.PrefixStore(f"lockstep/{meeting}", store)
    meeting, absent, told = uuid.uuid4().hex, set(range(1, size)), set()
    pause, deadline = threading.Event(), time.monotonic() + timeout
    while absent:
        for other in sorted(absent):
            if store.check([f"lockstep/{meeting}/here/{other}"]):
                absent.discard(other)
            elif store.check([f"lockstep/caller/{other}"]):
                caller = store.get(f"lockstep/caller/{other}").decode()
                if caller not in told:
                    told.add(caller)
                    store.set(f"lockstep/meeting/{caller}", meeting)
        if absent and time.monotonic() > deadline:
            raise dist.DistStoreError(f"absent: rank {', '.join(str(r) for r in sorted(absent))}")
        pause.wait(0.01)
    return dist.PrefixStore(f"lockstep/{meeting}", store)


def _explain(error: Exception, where: str, timeout: float) -> str:
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return f"the port of {where} is in use; choose another with --master_port or MASTER_PORT"
    return (
        f"could not meet the other ranks at {where} within {timeout:g} s (--timeout): are all "
        f"{os.environ['WORLD_SIZE']} of them started, and can they reach that address? ({str(error).splitlines()[0]})"
    )


def disconnect(world: World) -> None:
    """Leave the group. Wrapped models must be gone by now: a live DDP object makes gloo abort at exit."""
    if dist.is_initialized():
        gc.collect()
        with suppress(Exception):  # all work is done: a launcher that is gone, and its store with it, spoils nothing
            world.barrier()
            dist.destroy_process_group()


def pick_device(hardware: Hardware, local_rank: int) -> torch.device:
    """The device of this rank; more ranks than GPUs is an error, never a silent sharing."""
    gpus = torch.cuda.device_count()
    if hardware.device == "cuda" and gpus == 0:
        raise ValueError("--device cuda, but no GPU is visible (CUDA_VISIBLE_DEVICES?); use --device cpu")
    if hardware.device == "cpu" or gpus == 0:
        return torch.device("cpu")
    here = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if here > gpus:
        raise ValueError(f"{here} processes, but {gpus} GPU(s) are visible; start {gpus} or use --device cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _keep_watch(store: dist.Store, period: float = 1.0, grace: float = 5.0) -> None:
    """End this process when another rank has failed: the main thread may be stuck in a collective with it.

    When the agent that started us is gone, nobody would ever end or restart us: that is taken as a wish to stop.
    """
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def watch() -> None:
        pause, silent = threading.Event(), 0
        while silent < 2:  # no store any more, and yet the agent is there: the group is gone, and so is our task
            pause.wait(period)
            if agent is not None and os.getppid() != agent:  # its store has gone with it
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                if store.check([_FAILED]):
                    pause.wait(grace)
                    os._exit(1)
                silent = 0
            except Exception:
                silent += 1

    threading.Thread(target=watch, name="lockstep-watch", daemon=True).start()
