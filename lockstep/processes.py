"""Processes by more than their number: which one it is, whether it still runs, whether it was stopped."""

import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return what identifies this process, for other processes; see `is_running`."""
    host, machine = socket.gethostname(), _machine()
    return {"host": host, "pid": os.getpid(), "started": start_time(os.getpid()), "machine": machine}


def is_running(process: dict[str, Any]) -> bool | None:
    """Return whether a process still runs; None if it is (or was) on a machine where this one cannot look it up."""
    if (process.get("host"), process.get("machine")) != (socket.gethostname(), _machine()):
        return None
    return start_time(int(process["pid"])) == process["started"]


def _machine() -> str:
    """Return what is the same for processes that can look each other up: this boot, this container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def start_time(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks where it has them; None if there is no such process.

    No clock that can be set changes the ticks, and a process that reuses the number has others.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]  # a zombie has ended
    import psutil  # a tenth of the time to import lockstep, and needed on no Linux

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def state(pid: int) -> str:
    """Return the letter of the kernel for what a process does: `T` is stopped; `?` if that cannot be known."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def continue_stopped(processes: Iterable[dict[str, Any]]) -> None:
    """Send SIGCONT to those of this machine that were stopped; else they could not even end."""
    for process in processes:
        if is_running(process) and state(process["pid"]) in "Tt":
            with suppress(OSError):
                os.kill(process["pid"], signal.SIGCONT)
