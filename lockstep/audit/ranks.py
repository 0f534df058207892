"""Start the ranks of an audit, watch whether they get on, end them."""

import importlib
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from . import rank as one
from .model import Trace, read_ranks
from .rank import Order
from .source import Site, foreign

_POLL = 0.05
_BUSY = 0.02
"""Share of a core above which, on the average, ranks count as getting on."""


def watch_ranks(order: Order, patience: float, limit: float) -> Trace:
    """Run `order` to its end. Ranks that do nothing for `patience` seconds hang."""
    importlib.import_module("torch._dynamo")  # the first optimizer imports it, for seconds: once here, not in each rank
    folder = Path(tempfile.mkdtemp(prefix="lockstep-audit-"))
    try:
        with _started(order, folder) as pids:
            end = _wait(pids, folder, patience if order.mapped else 4 * patience, limit, order.mapped)
            hung = end == "hung"
            printed = [_text(folder / f"rank{n}.out") for n in range(order.nproc)]  # the signal for stacks adds to it
            stacks = _stacks(pids, folder) if hung else {}
            statuses = [_status(pid, folder, number, end != "through") for number, pid in enumerate(pids)]
            # One that is killed makes others fail: they must not write that down.
            for pid in pids if end != "through" else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            ranks = read_ranks(folder, order.nproc, statuses)
            (folder / one.GO).touch()
        for number, stack in stacks.items():
            ranks[number].stack = stack
        for rank in ranks:
            rank.printed = printed[rank.number]
        return Trace(ranks, hung, over=end == "over")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that is free, and not of those that the system gives to whoever asks for any: nobody else will take it
    before it is used."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, limits.read_text().split()) if limits.exists() else (32768, 60999)
    others = max(range(10_000, first), range(last + 1, 65_536), key=len)
    for port in (*random.SystemRandom().sample(others, min(20, len(others))), 0):  # 0: any, if all else fails
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no port is free")


@contextmanager
def _started(order: Order, folder: Path) -> Iterator[list[int]]:
    port, pids = free_port(), list[int]()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for number in range(order.nproc):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # between fork and append it would leave a stray
            pid = os.fork()
            if pid == 0:
                try:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                    one.live(order, number, port, folder)
                except BaseException:  # a fault of the audit itself: it must be seen, and end here
                    traceback.print_exc()
                finally:
                    os._exit(70)
            pids.append(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        yield pids
    finally:
        for pid in pids:
            _kill(pid)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _wait(
    pids: list[int], folder: Path, patience: float, limit: float, by_cpu: bool
) -> Literal["through", "hung", "over"]:
    """Until all ranks are through, or nothing moves any more, or the time is over."""
    begun = now = asked = time.monotonic()
    idle, seen, used = 0.0, -1, 0.0
    while True:
        time.sleep(_POLL)
        last, now = now, time.monotonic()
        idle += min(now - last, 1)  # a machine that stood still is no rank that does
        running = [pid for n, pid in enumerate(pids) if not (folder / f"rank{n}.{one.DONE}").exists() and _alive(pid)]
        if not running:
            return "through"
        size = sum(p.stat().st_size for p in folder.glob("*.jsonl"))
        if size != seen:
            seen, idle = size, 0.0
        if now - asked > 1 and by_cpu:
            cpu = sum(_cpu(pid) for pid in running)
            if cpu - used > _BUSY * len(running) * (now - asked) or any(_on_disk(pid) for pid in running):
                idle = 0.0
            used, asked = cpu, now
        if idle > patience:
            return "hung"
        if now - begun > limit:
            return "over"


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cpu(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0.0


def _on_disk(pid: int) -> bool:
    """Whether a thread of a process waits for a disk, which is no hang however long it takes."""
    with suppress(OSError):  # it has ended, or this is no Linux
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return any(stat.rpartition(")")[2].split()[0] == "D" for stat in stats)
    return False


def _status(pid: int, folder: Path, number: int, cut: bool) -> int | None:
    """A rank's exit status; None if it had to be ended."""
    done = folder / f"rank{number}.{one.DONE}"
    if done.exists():
        return int(done.read_text() or 0)
    if cut and _alive(pid):
        return None
    _, code = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(code)


def _stacks(pids: list[int], folder: Path) -> dict[int, list[Site]]:
    """Where the ranks that hang are, by faulthandler, which needs no co-operation of what they hang in."""
    hanging = [n for n, pid in enumerate(pids) if not (folder / f"rank{n}.{one.DONE}").exists() and _alive(pid)]
    for number in hanging:
        os.kill(pids[number], signal.SIGUSR2)
    dumps, before, deadline = [""], None, time.monotonic() + 5
    while (dumps != before or not all(dumps)) and time.monotonic() < deadline:
        time.sleep(0.3)
        before, dumps = dumps, [_text(folder / f"rank{number}.stack") for number in hanging]
    return {number: _user_lines(dump) for number, dump in zip(hanging, dumps, strict=True)}


def _user_lines(dump: str) -> list[Site]:
    main = next((block for block in re.split(r"\n(?=\S*[Tt]hread )", dump) if "runpy" in block), dump)
    lines = [Site(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', main)]
    return [s for s in lines if not foreign(s.file)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
