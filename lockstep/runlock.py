"""One run per folder: a lock file that names the process which writes there, and tells when that process has ended.

    <run>/.lock      {"host": ..., "pid": ..., "started": ..., "machine": ...}, touched every few seconds

A process of the same machine (and the same container) is looked up. Any other cannot be looked up: its lock counts as
stale when it has not been touched for a while.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .processes import is_running, this_process

NAME = ".lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0


class RunLock:
    """The lock of a run folder, held by rank 0 from `acquire` to `release`."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._own = this_process()
        self._released = threading.Event()
        self._held = False

    def acquire(self) -> None:
        """Create the lock file; a ValueError names the process that holds it."""
        try:
            with _one_at_a_time(self.path.parent):
                while not self._create():
                    holder = self._holder()
                    if holder is not None and not self._is_stale(holder):
                        raise ValueError(
                            f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']}; wait for "
                            "that run to end or stop it, or choose another --out"
                        )
                    self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"cannot lock {self.path}: {error.strerror}; choose another --out") from None
        self._held = True
        threading.Thread(target=self._keep_fresh, name="lockstep-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the lock file, if this process still holds it."""
        if self._held:
            self._held = False
            self._released.set()
            with suppress(OSError):
                if self._holder() == self._own:
                    self.path.unlink()

    def _create(self) -> bool:
        """Create the file; False if there is one."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less what the umask takes away
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:  # whoever reads it half-written waits at `_one_at_a_time`
            file.write(json.dumps(self._own))
        return True

    def _holder(self) -> dict[str, Any] | None:
        """Return the content of the lock file; None if it is gone or damaged."""
        try:
            holder = json.loads(self.path.read_text())
            return holder if {"host", "pid", "started"} <= holder.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _is_stale(self, holder: dict[str, Any]) -> bool:
        if (running := is_running(holder)) is not None:
            return not running
        before, deadline = self._touched(), time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            threading.Event().wait(min(1.0, STALE_SECONDS / 10))
            if self._touched() != before:
                return False  # touched, or just released: what was chosen before may be out of date
        return True

    def _touched(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_mtime_ns
        return 0

    def _keep_fresh(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(OSError):
                if self._holder() == self._own:
                    os.utime(self.path)


def is_held(folder: Path) -> bool:
    """Return whether a run that is still going on holds the lock of a folder."""
    lock = RunLock(folder)
    if (holder := lock._holder()) is None:
        return False
    if (running := is_running(holder)) is not None:
        return running
    return time.time() - lock._touched() / 1e9 < STALE_SECONDS


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time create or replace a lock; file systems without flock do without."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
