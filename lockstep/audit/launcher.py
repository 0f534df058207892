"""Start the ranks of an audit, detect a hang, end them."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from .model import Trace, read_ranks
from .probes.steps import ENOUGH
from .source import Site, foreign
from .worker import ALL_DONE, DONE, LaunchSpec, run_worker

_Ending = Literal["finished", "hung", "timed out", "stopped"]
_POLL_SECONDS = 0.05
_BUSY = 0.02
"""CPU usage of a rank, as a share of one core, above which it makes progress."""


@dataclass(frozen=True)
class _Process:
    """The process of one rank."""

    rank: int
    pid: int
    folder: Path

    def text(self, suffix: str) -> str:
        """Return the content of one of its files, empty if there is none."""
        path = self.folder / f"rank{self.rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_alive(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def has_finished(self) -> bool:
        return (self.folder / f"rank{self.rank}.{DONE}").exists()

    @property
    def is_running(self) -> bool:
        return not self.has_finished and self.is_alive

    @property
    def cpu_seconds(self) -> float:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))
        return 0.0

    @property
    def waits_for_disk(self) -> bool:
        """Whether a thread waits for a disk, which is no hang however long it takes."""
        with suppress(OSError):  # the process has exited, or this is not Linux
            stats = [task.read_text() for task in Path(f"/proc/{self.pid}/task").glob("*/stat")]
            return any(stat.rpartition(")")[2].split()[0] == "D" for stat in stats)
        return False

    def exit_status(self) -> int | None:
        """Return the exit status; None for a process that is still running."""
        if self.has_finished:
            return int(self.text(DONE) or 0)
        if self.is_alive:
            return None
        _, code = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(code)

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def run_ranks(spec: LaunchSpec, patience: float, limit: float) -> Trace:
    """Run the script on all ranks and return their records. Ranks without progress for `patience` seconds hang."""
    importlib.import_module("torch._dynamo")  # the first optimizer imports it, for seconds: once here, not in each rank
    folder = Path(tempfile.mkdtemp(prefix="lockstep-audit-"))
    try:
        with _started(spec, folder) as processes:
            end = _wait(processes, patience if spec.cuda_on_cpu else 4 * patience, limit, spec.cuda_on_cpu)
            printed = [process.text("out") for process in processes]  # before the signal for stacks adds to it
            stacks = _stacks([p for p in processes if p.is_running]) if end == "hung" else {}
            statuses = [process.exit_status() for process in processes]
            # When one rank is killed, others fail: that must not be recorded.
            for process in processes if end != "finished" else []:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGSTOP)
            ranks = read_ranks(folder, spec.nproc, statuses)
            (folder / ALL_DONE).touch()
        for rank in ranks:
            rank.printed, rank.stack = printed[rank.number], stacks.get(rank.number, [])
        return Trace(ranks, end == "hung", over=end == "timed out")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a free port outside the ephemeral range, so that no other process is given it before it is used."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, limits.read_text().split()) if limits.exists() else (32768, 60999)
    others = max(range(10_000, first), range(last + 1, 65_536), key=len)
    for port in (*random.SystemRandom().sample(others, min(20, len(others))), 0):  # 0: any, if all others are taken
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return int(listener.getsockname()[1])
    raise OSError("no port is free")


@contextmanager
def _started(spec: LaunchSpec, folder: Path) -> Iterator[list[_Process]]:
    """Fork one process for each rank, and kill them all at the end."""
    port, processes = free_port(), list[_Process]()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in range(spec.nproc):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a Ctrl-C here would lose track of the process
            pid = os.fork()
            if pid == 0:
                try:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                    run_worker(spec, rank, port, folder)
                except BaseException:  # an error of the audit itself
                    traceback.print_exc()
                finally:
                    os._exit(70)
            processes.append(_Process(rank, pid, folder))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        yield processes
    finally:
        for process in processes:
            process.kill()


def _wait(processes: list[_Process], patience: float, limit: float, by_cpu: bool) -> _Ending:
    """Wait until all ranks have finished, none makes progress, a probe asks for the end, or `limit` seconds passed."""
    started = now = measured = time.monotonic()
    idle, recorded, cpu = 0.0, -1, 0.0
    while True:
        time.sleep(_POLL_SECONDS)
        last, now = now, time.monotonic()
        idle += min(now - last, 1)  # time in which the whole machine was suspended does not count
        running = [process for process in processes if process.is_running]
        if not running:
            return "finished"
        if (processes[0].folder / ENOUGH).exists():
            return "stopped"
        size = sum(p.stat().st_size for p in processes[0].folder.glob("*.jsonl"))
        if size != recorded:
            recorded, idle = size, 0.0
        if now - measured > 1 and by_cpu:
            last_cpu, cpu = cpu, sum(process.cpu_seconds for process in running)
            is_busy = cpu - last_cpu > _BUSY * len(running) * (now - measured)
            idle = 0.0 if is_busy or any(process.waits_for_disk for process in running) else idle
            measured = now
        if idle > patience:
            return "hung"
        if now - started > limit:
            return "timed out"


def _stacks(hung: list[_Process]) -> dict[int, list[Site]]:
    """Return the user's lines in the stack of each rank that hangs, by faulthandler, which works inside any call."""
    for process in hung:
        os.kill(process.pid, signal.SIGUSR2)
    dumps, before, deadline = [""], None, time.monotonic() + 5
    while (dumps != before or not all(dumps)) and time.monotonic() < deadline:
        time.sleep(0.3)
        before, dumps = dumps, [process.text("stack") for process in hung]
    return {process.rank: _user_lines(dump) for process, dump in zip(hung, dumps, strict=True)}


def _user_lines(dump: str) -> list[Site]:
    main = next((block for block in re.split(r"\n(?=\S*[Tt]hread )", dump) if "runpy" in block), dump)
    lines = [Site(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', main)]
    return [line for line in lines if not foreign(line.file)]
