"""One run per folder: a lock file that names the process which writes there, and tells when that process is gone.

    <run>/.lock      {"host": ..., "pid": ..., "started": ...}, touched every few seconds

On the same host the process is looked up. A process on another host cannot be looked up: its lock counts as stale when
it has not been touched for a while, by the clock of the file system.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAME = ".lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0


class RunLock:
    """The lock of a run folder, held by rank 0 from `acquire` to `release`."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._released = threading.Event()
        self._held = False

    def acquire(self) -> None:
        """Create the lock file; a ValueError names the process that holds it."""
        own = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": start_time(os.getpid())})
        with _one_at_a_time(self.path.parent):
            while not self._create(own):
                holder = self._holder()
                if holder is not None and not self._is_stale(holder):
                    raise ValueError(
                        f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']}; wait for that "
                        "run to end or stop it, or choose another --out"
                    )
                with suppress(OSError):
                    self.path.unlink()
        self._held = True
        threading.Thread(target=self._keep_fresh, name="lockstep-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the lock file. Nothing happens if this process does not hold the lock."""
        if self._held:
            self._held = False
            self._released.set()
            with suppress(OSError):
                self.path.unlink()

    def _create(self, own: str) -> bool:
        """Create the file with its whole content in one step; False if there is one."""
        temporary = self.path.with_name(f"{NAME}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(own)
        try:
            os.link(temporary, self.path)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink()

    def _holder(self) -> dict[str, Any] | None:
        """Return the content of the lock file; None if it is gone or unreadable."""
        try:
            holder = json.loads(self.path.read_text())
            return holder if {"host", "pid", "started"} <= holder.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _is_stale(self, holder: dict[str, Any]) -> bool:
        if holder["host"] == socket.gethostname():
            return start_time(int(holder["pid"])) != holder["started"]
        before = self._touched()
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            threading.Event().wait(min(1.0, STALE_SECONDS / 10))
            if self._touched() != before:
                return not self.path.exists()  # released, or touched: the other process is running
        return True

    def _touched(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_mtime_ns
        return 0

    def _keep_fresh(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(OSError):
                os.utime(self.path)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time replace a stale lock; file systems without flock do without."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def start_time(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks where it has them; None if there is no such process.

    No clock that can be set changes the ticks, and a process that reuses the number has others.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]  # a zombie has ended
    import psutil  # a tenth of the time to import lockstep, and needed on no Linux

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
