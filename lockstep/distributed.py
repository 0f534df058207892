"""The process group: rank, device, agreement between ranks, signals, and what happens when a rank fails.

`session` makes the group from the environment that torchrun (or a debugger, or a scheduler) sets, and destroys it
again. Without that environment the world has one rank, and every collective here returns its input.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import agent, rendezvous
from .activity import Activity
from .processes import this_process
from .rendezvous import RendezvousError as RendezvousError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HANG_STATUS = 76
"""Exit status of a rank of a run that hangs: EX_PROTOCOL of sysexits.h."""
_FAILED = "lockstep/failed"
SUCCEEDED = "lockstep/succeeded"
"""The key under which ranks that exit with status 0 are counted."""
_failures: dist.Store | None = None
STORE_SECONDS = 10.0
"""How long the store may take to answer when a rank has failed."""
Answer = TypeVar("Answer")


class RunFailed(RuntimeError):
    """The run cannot continue, on any rank; the message says why."""

    details = ""
    """A traceback, where the cause is in the user's code."""

    @classmethod
    def of(cls, error: BaseException, behind: TracebackType | None) -> "RunFailed":
        """Return the failure of this rank by an error of the user's code, whose traceback is `behind`."""
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        failed = cls(f"{rank}{type(error).__name__}: {error}")
        failed.details = "".join(traceback.format_exception(type(error), error, behind))
        return failed


@dataclass
class World:
    """This rank: its number, its device, and collectives with the other ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    cpu_group: dist.ProcessGroup | None = None
    """A gloo group for small messages between the hosts; it never waits for a device."""
    store: dist.Store | None = None
    """The key-value store of the group, where there are several ranks."""
    activity: Activity = field(default_factory=Activity)
    folder: Path = field(default_factory=Path)  # where hang.txt goes
    closing: ExitStack = field(default_factory=ExitStack)  # closed before the group is left: runs, with their locks

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def seed_generators(self, seed: int) -> None:
        """Seed torch's global generators of the CPU and of this device, with the same result as `torch.manual_seed`.

        That one also seeds kinds of devices that are not there, and formats a stack trace for each: in every
        micro-batch it would take longer than all else that the engine does on the host.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; in place, on the tensor's device."""
        if self.size > 1:
            with self.activity.waiting():
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.cpu_group)
        return values or []

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of all ranks' numbers. A message between hosts: it does not wait for the devices."""
        return self.start_all_reduce_max(number)()

    def start_all_reduce_max(self, number: int) -> Callable[[], int]:
        """Return what waits for the largest of all ranks' numbers, which is on its way from now on."""
        if self.size == 1:
            return lambda: number
        largest = torch.tensor([number], dtype=torch.int32)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.cpu_group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(largest.item())

        return answer

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank: how ranks decide together to skip a step, or to stop."""
        return self.all_reduce_max(int(flag)) > 0

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, one rank's after the other's, on every rank: for metrics that do not add up."""
        return torch.cat(self.broadcast(self.gather(tensor.detach().cpu()))).to(tensor.device)

    def print(self, *values: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)  # noqa: T201

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 and return its result on every rank; its ValueError is raised on every rank."""
        result, error = None, None
        if self.is_main:
            try:
                result = function()
            except ValueError as raised:
                error = str(raised)
        result, error = self.broadcast((result, error))
        if error is not None:
            raise ValueError(error)
        return result

    def barrier(self) -> None:
        """Wait for all ranks; a time-out names the ranks that did not arrive."""
        if self.cpu_group is not None:
            dist.monitored_barrier(self.cpu_group, wait_all_ranks=True)


def first_to_fail() -> bool:
    """Return whether no other rank has failed before: only the first failure is printed."""
    if _failures is None:  # before the group exists, ranks mostly fail for the same reason
        if os.environ.get("LOCAL_RANK", "0") != "0":
            threading.Event().wait(20)  # the launcher ends all ranks at the first exit: local rank 0 prints and exits
        return True  # still running: no rank has exited, so perhaps none has printed
    try:
        first = answer_within(STORE_SECONDS, partial(_failures.add, _FAILED, 1)) == 1
    except TimeoutError:
        return _first_on_machine()
    except Exception:  # the store was in the process that failed first, or the machine with it is gone
        return not rendezvous.on_one_machine() and _first_on_machine()
    if not first:
        threading.Event().wait(2)  # again: the rank that prints exits first
    return first


def _first_on_machine() -> bool:
    """Report that the store is out of reach, and return whether this rank does so for its machine: local rank 0."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Event().wait(3)  # the launcher ends all ranks at the first exit
        return False
    report_cut_off("does not answer")
    return True


def record_cause(text: str) -> None:
    """Write why this rank failed to the file that torchrun makes its summary from, the last thing on the screen."""
    if not (name := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    # A second ago: of the ranks that end in the same second, torchrun must take this one for the cause.
    cause = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}}
    with suppress(OSError):
        unfinished = Path(f"{name}.tmp")  # torchrun fails itself if it reads half of it
        unfinished.write_text(json.dumps({"message": cause}))
        unfinished.replace(name)


def report_cut_off(how: str) -> None:
    """Print that the store is out of reach, and see to it that the launcher ends too."""
    text = (
        f"lockstep: rank {os.environ['RANK']}: the store at {rendezvous.address()} {how}: that machine, or the network "
        "to it, is down; resume the run from its last checkpoint"
    )
    record_cause(text)
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _kill_if_hung(os.getppid())


def _kill_if_hung(agent: int) -> None:
    """Start a process that kills torchrun's agent unless it ends soon: its own store calls may never return either."""
    text = "lockstep: torchrun waits for a store that does not answer, and is killed"
    script = f"for _ in $(seq {STORE_SECONDS:.0f}); do sleep 1; kill -0 $0 2>/dev/null || exit 0; done; "
    script += f'echo "{text}" >&2; kill -9 $0'
    subprocess.Popen(["sh", "-c", script, str(agent)], start_new_session=True)


def report_success() -> bool:
    """Count this rank as one that exits with status 0: a launcher that a signal has reached looks it up.

    Return whether the launcher, which has the store, answers.
    """
    try:
        if isinstance(_failures, dist.PrefixStore):
            answer_within(STORE_SECONDS, partial(_failures.underlying_store.add, SUCCEEDED, 1))
        return True
    except Exception:
        return False


def answer_within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """Return the answer of the store; TimeoutError after `seconds`. Over a cut connection a call never returns."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="lockstep-store-call", daemon=True).start()
    while seconds > 0:  # second by second: time during which this process was stopped (Ctrl-Z) does not count
        with suppress(TimeoutError):
            return answer.result(min(seconds, 1.0))
        seconds -= 1.0
    raise TimeoutError(f"no answer from the store at {rendezvous.address()}")


def lost_contact(error: Exception) -> str | None:
    """Return a message if what failed is a collective: the cause is on another rank, a stack trace would mislead."""
    text = str(error)
    if not isinstance(error, dist.DistError | RuntimeError):
        return None
    if any(sign in text for sign in ("imed out", "imeout")):
        reason = text.splitlines()[0].rpartition("] ")[2]  # without the line of gloo's source
        return (
            f"waited too long for another rank (--timeout): {reason}; it hangs, or its machine or the network is down"
        )
    gone = ("onnection closed", "onnection reset", "ocket closed", "roken pipe", "remote process exited")
    if any(sign in text for sign in gone):
        return "lost the connection to another rank, which has exited"
    return None


@contextmanager
def session(device: str = "auto", timeout: float = 600.0, local_rank: int | None = None) -> Iterator[World]:
    """Join the process group, yield this rank's world, and leave the group.

    After an exception the group is not left: waiting for the other ranks would hang.
    """
    world = connect(device, timeout, local_rank)
    yield world
    disconnect(world)


def connect(device: str = "auto", timeout: float = 600.0, local_rank: int | None = None) -> World:
    """Join the process group that the environment describes, or return a world of one rank.

    `timeout`: seconds after which a rank that waits for the others gives up. `local_rank` counts where LOCAL_RANK is
    not set.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World(device=pick_device(device, 0))
    missing = [name for name in ENVIRONMENT if name not in os.environ and name != "LOCAL_RANK"]
    if missing:
        raise ValueError(f"RANK or WORLD_SIZE is set but not {', '.join(missing)}; torchrun sets them all")
    agent.start_monitor()
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank or 0))
    own_device = pick_device(device, local_rank)
    on_gpu, limit = own_device.type == "cuda", timedelta(seconds=timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with rendezvous.explained(timeout):
        rendezvous.choose_interface()
        store = rendezvous.open_store(rank, size, timeout)
    with rendezvous.explained(timeout, have_met=True):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit,
            device_id=own_device if on_gpu else None,
        )  # fmt: skip
        cpu_group = dist.new_group(backend="gloo", timeout=limit) if size > 1 else None
    if size > 1:
        agent.ranks[:] = [{}] * size
        dist.all_gather_object(agent.ranks, this_process(), group=cpu_group)
        follow_failures(store, timeout)
    return World(rank, size, local_rank, own_device, "nccl" if on_gpu else "gloo", cpu_group, store)


def disconnect(world: World) -> None:
    """Leave the group. Wrapped models must be deleted before: a live DDP object makes gloo abort at exit."""
    if dist.is_initialized():
        gc.collect()
        with suppress(Exception):  # all work is done: it does no harm if the launcher, and its store, have exited
            world.barrier()
            dist.destroy_process_group()


def pick_device(device: str, local_rank: int) -> torch.device:
    """Return the device of this rank; more ranks than GPUs is an error, never a silent sharing."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        raise ValueError("--device cuda, but no GPU is visible (CUDA_VISIBLE_DEVICES?); use --device cpu")
    if device == "cpu" or gpus == 0:
        return torch.device("cpu")
    local_ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if local_ranks > gpus:
        raise ValueError(f"{local_ranks} processes, but {gpus} GPU(s) are visible; start {gpus} or use --device cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def follow_failures(store: dist.Store, timeout: float, period: float = 1.0, grace: float = 5.0) -> None:
    """Start a thread that exits this process when another rank has failed: the main thread may hang in a collective.

    It exits too when the store has not answered for `timeout` seconds.
    """
    global _failures
    _failures, store = store, store.clone()  # type: ignore[attr-defined]

    def monitor() -> None:
        pause, unreachable = threading.Event(), 0
        while unreachable < 2:  # the store is gone: the group was left in order, or the agent is gone
            pause.wait(period)
            try:
                if answer_within(timeout, partial(store.check, [_FAILED])):
                    pause.wait(grace)
                    os._exit(1)
                unreachable = 0
            except TimeoutError:
                _exit_cut_off(timeout)
            except Exception:
                unreachable += 1

    threading.Thread(target=monitor, name="lockstep-failure-monitor", daemon=True).start()


def _exit_cut_off(timeout: float) -> NoReturn:
    """Exit because the store does not answer: this machine is cut off from the one that has it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        report_cut_off(f"has not answered for {timeout:g} s (--timeout)")
    else:
        threading.Event().wait(3)  # local rank 0 prints, and the launcher ends all ranks at the first exit
    os._exit(1)
