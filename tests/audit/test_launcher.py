"""When the audit takes ranks to hang, and when not."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from audit.test_command import audit, names
from lockstep.audit import launcher
from lockstep.audit.launcher import _Process as Process


class Clock:
    """A clock that a test sets, with an action at its n-th sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: dict[int, Callable[[], object]]):
        self.now, self.polls, self.at = 0.0, 0, at
        monkeypatch.setattr(launcher, "time", SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.now))

    def sleep(self, seconds: float) -> None:
        self.now, self.polls = self.now + seconds, self.polls + 1
        self.at.get(self.polls, lambda: None)()


def test_a_suspended_machine_is_no_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def suspend() -> None:
        clock.now += 10_000

    clock = Clock(monkeypatch, {3: suspend, 6: (tmp_path / "rank0.done").touch})
    assert launcher._wait([Process(0, os.getpid(), tmp_path)], patience=5, limit=1e9, by_cpu=False) == "finished"


def test_ranks_without_progress_hang_after_the_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch, {20: lambda: (tmp_path / "rank0.jsonl").write_text("{}")})
    assert launcher._wait([Process(0, os.getpid(), tmp_path)], patience=5, limit=1e9, by_cpu=False) == "hung"
    assert clock.now == pytest.approx(6, abs=0.2)  # from the last record, which was written after one second


@pytest.mark.parametrize(("waits_for_disk", "end"), [(False, "hung"), (True, "timed out")])
def test_a_rank_that_waits_for_a_disk_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits_for_disk: bool, end: str
) -> None:
    Clock(monkeypatch, {})
    monkeypatch.setattr(Process, "cpu_seconds", 0.0)
    monkeypatch.setattr(Process, "waits_for_disk", waits_for_disk)
    assert launcher._wait([Process(0, os.getpid(), tmp_path)], patience=5, limit=60, by_cpu=True) == end


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="not Linux")
def test_a_process_in_an_uninterruptible_wait_is_detected() -> None:
    """As one that waits for a disk; here it waits for a vfork child."""
    pid = os.fork()
    if pid == 0:
        libc = ctypes.PyDLL(None)
        if libc.vfork() == 0:
            libc.sleep(30)
            libc._exit(0)
        os._exit(0)
    try:
        process, deadline = psutil.Process(pid), time.monotonic() + 20
        while process.status() != psutil.STATUS_DISK_SLEEP and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.status() != psutil.STATUS_DISK_SLEEP:
            pytest.skip("this kernel shows no such wait")
        child = process.children()[0].pid
        assert Process(0, pid, Path()).waits_for_disk and not Process(0, child, Path()).waits_for_disk
    finally:
        for process in (psutil.Process(pid), *psutil.Process(pid).children()):  # a parent that resumes would abort
            process.send_signal(signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_hang_of_many_ranks_is_found(tmp_path: Path) -> None:
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() != 6:
            dist.barrier()
    """
    done = audit(tmp_path, script, "--nproc", "8", "--steps", "0", "--patience", "4")
    assert done.returncode == 1 and names(tmp_path) == ["collective-mismatch"], done.stdout
    assert "ranks 0, 1, 2, 3, 4, 5, 7 only" in done.stdout and "rank 6 had ended" in done.stdout
