"""The agent that has started this process, torchrun's or that of Lockstep's own launcher, and what to do without it."""

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .processes import continue_stopped

LAUNCHER = "LOCKSTEP_LAUNCHER"
"""The variable by which `launch` tells its ranks "<run id>/<process id>" of itself."""
ranks: list[dict[str, Any]] = []
"""The processes of all ranks, once they have met."""


def start_monitor(period: float = 1.0) -> None:
    """Start a thread that requests a stop when the agent that started this process is gone.

    Nothing would ever stop or restart this process, and its store is gone too. During start-up SIGTERM ends it at once.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = _launcher() or os.getppid()

    def monitor() -> None:
        while os.getppid() == agent:
            threading.Event().wait(period)
        clean_up_after_launcher()
        continue_stopped(ranks)  # also where the agent is torchrun's own
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=monitor, name="lockstep-agent-monitor", daemon=True).start()


def log_folder_prefix(run_id: str) -> str:
    """Return how the name of the temporary folder begins that a launcher has for its agent."""
    return f"lockstep-{run_id}-"


def clean_up_after_launcher(patience: float = 0.0) -> None:
    """Do what Lockstep's own launcher could not do if it was killed: remove its folder, let ranks end that are stopped.

    The connections of a process that is killed are closed a moment before it is gone: `patience` is for that moment.
    """
    launcher, deadline = _launcher(), time.monotonic() + patience
    while os.getppid() == launcher and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    if launcher is not None and os.getppid() != launcher:
        for folder in Path(tempfile.gettempdir()).glob(f"{log_folder_prefix(os.environ['TORCHELASTIC_RUN_ID'])}*"):
            shutil.rmtree(folder, ignore_errors=True)
        continue_stopped(ranks)


def _launcher() -> int | None:
    """Return the process id of Lockstep's own launcher, if that has started this process; it may have ended by now."""
    run, _, pid = os.environ.get(LAUNCHER, "").partition("/")
    return int(pid) if pid and run == os.environ.get("TORCHELASTIC_RUN_ID") else None
