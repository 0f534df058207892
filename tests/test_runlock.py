"""One run per folder: who holds the lock, and when a lock is stale."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

import lockstep
from lockstep import processes, runlock
from lockstep.config import Run
from lockstep.distributed import World
from lockstep.processes import start_time
from lockstep.rundir import open_run_dir
from lockstep.runlock import RunLock

Acquire = Callable[[Path], RunLock]


@pytest.fixture
def acquire() -> Iterator[Acquire]:
    """Locks that are released after the test: each has a thread."""
    locks: list[RunLock] = []

    def acquire(folder: Path) -> RunLock:
        lock = RunLock(folder)
        lock.acquire()
        locks.append(lock)
        return lock

    yield acquire
    for lock in locks:
        lock.release()


def held_by(folder: Path, **holder: object) -> None:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": start_time(os.getpid())}
    own["machine"] = processes._machine()
    (folder / ".lock").write_text(json.dumps({**own, **holder}))


def test_a_folder_in_use_is_refused_and_the_process_named(tmp_path: Path, acquire: Acquire) -> None:
    first = acquire(tmp_path)
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on {socket.gethostname()}"):
        acquire(tmp_path)
    first.release()
    acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_has_ended_is_replaced(tmp_path: Path, acquire: Acquire) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    held_by(tmp_path, pid=ended.pid)
    acquire(tmp_path)


def test_a_process_that_reuses_the_number_does_not_hold_the_lock(tmp_path: Path, acquire: Acquire) -> None:
    held_by(tmp_path, started="1")
    acquire(tmp_path)


def test_a_zombie_holds_no_lock(tmp_path: Path, acquire: Acquire) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held_by(tmp_path, pid=child.pid, started=start_time(child.pid))
    with pytest.raises(ValueError, match="in use"):
        acquire(tmp_path)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected its status
    acquire(tmp_path)
    child.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"host": "a"}', "\x00"])
def test_a_damaged_lock_is_replaced(tmp_path: Path, acquire: Acquire, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    acquire(tmp_path)


def test_the_lock_of_another_host_counts_while_it_is_touched(
    tmp_path: Path, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlock, "STALE_SECONDS", 1.0)
    held_by(tmp_path, host="elsewhere")
    done = threading.Event()

    def touch() -> None:
        while not done.wait(0.05):
            os.utime(tmp_path / ".lock")

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(ValueError, match="on elsewhere"):
            acquire(tmp_path)
    finally:
        done.set()
        thread.join()
    acquire(tmp_path)  # nobody touches it any more


def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    held_by(tmp_path, started="1")  # stale: all of them want to replace it
    locks = [RunLock(tmp_path) for _ in range(16)]
    acquired: list[RunLock] = []

    def acquire(lock: RunLock) -> None:
        try:
            lock.acquire()
            acquired.append(lock)
        except ValueError:
            pass

    threads = [threading.Thread(target=acquire, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(acquired) == 1
    acquired[0].release()


def test_a_run_holds_the_lock_while_it_trains_and_not_after(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with open_run_dir(Run(out=out), "plain", World()):
        for resume in (None, "auto"):
            with pytest.raises(ValueError, match="in use by process"):
                lockstep.fit(tiny.Plain, n_steps=2, device="cpu", out=out, resume=resume)
    lockstep.fit(tiny.Plain, n_steps=2, device="cpu", out=out)
    assert not (tmp_path / "run" / ".lock").exists()
    lockstep.fit(tiny.Plain, n_steps=4, device="cpu", out=out, resume="auto")


def test_a_failed_run_lets_go_of_the_lock(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(ValueError, match="fewer than the global batch"):
        lockstep.fit(tiny.Plain, batch_size=5000, device="cpu", out=out)
    lockstep.fit(tiny.Plain, n_steps=2, device="cpu", out=out)


def test_a_lock_that_cannot_be_made_or_removed_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match="cannot lock"):
        RunLock(tmp_path).acquire()


def test_a_process_of_another_container_is_not_looked_up(
    tmp_path: Path, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlock, "STALE_SECONDS", 0.5)
    held_by(tmp_path, machine="another", started="1")
    waited = threading.Thread(target=lambda: acquire(tmp_path))
    waited.start()
    waited.join()
    assert json.loads((tmp_path / ".lock").read_text())["machine"] == processes._machine()


def test_a_lock_that_was_lost_is_left_to_its_new_holder(tmp_path: Path, acquire: Acquire) -> None:
    lock = acquire(tmp_path)
    held_by(tmp_path, host="elsewhere")
    lock.release()
    assert json.loads((tmp_path / ".lock").read_text())["host"] == "elsewhere"
