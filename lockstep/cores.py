"""The cores of this machine, and whether they suffice for as many processes as are asked for."""

import os
import sys

FAR_BEYOND = 4
"""Processes per core above which the user is asked; up to 16 are started in any case."""


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores(nproc: int) -> None:
    """Warn of far more processes than cores; on a terminal ask, and raise a ValueError if the answer is no."""
    cores = available_cores()
    if nproc <= max(16, FAR_BEYOND * cores):
        return
    text = f"lockstep: {nproc} processes on {cores} core(s): each needs its own memory, and they wait for one another"
    if not sys.stdin.isatty():
        sys.stderr.write(f"{text}\n")
        return
    sys.stderr.write(f"{text}. Start them? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError(f"nothing was started; use --nproc {cores} or fewer")
