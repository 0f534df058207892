"""`lockstep top`: what it shows of a run that is going on, and of one that is not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lockstep.commands import top
from lockstep.distributed import World
from lockstep.runlock import RunLock
from lockstep.watch.diagnosis import RankState
from lockstep.watch.hang import HangWatch
from lockstep.watch.live import FILE, device_load, read_live, write_live


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run at step 40 of 100."""
    (tmp_path / "receipt.json").write_text(json.dumps({"recipe": "dit: DiT", "n_steps": 100}))
    rows = [{"step": step, "time": 10.0 * step, "loss": 1 / step, "lr": 1e-3} for step in (20, 40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00 rank 1 is slower than the others\n")
    return tmp_path


def shown(view: top.View, width: int = 80) -> str:
    console = Console(width=width, record=True, file=None)
    with console.capture() as captured:
        console.print(view.draw())
    return captured.get()


def states(**more: Any) -> list[RankState]:
    return [RankState(rank, beat=1, phase="step", step=40, memory=2_000_000_000, **more) for rank in (0, 1)]


def test_every_rank_of_a_running_job_is_shown(folder: Path) -> None:
    lock = RunLock(folder)
    lock.acquire()
    try:
        write_live(folder, states())
        view = top.View(folder)
        shown(view)
        content = read_live(folder)
        assert content is not None
        content["time"] += 10.0
        content["ranks"][1]["data_seconds"] += 4.0
        (folder / FILE).write_text(json.dumps(content))
        text = shown(view)
    finally:
        lock.release()
    assert view.running and "step 40 of 100 (40%)  left 0:10:00" in text and "loss 0.025" in text
    assert "40%" in text.split("data wait")[1] and "2.0 GB" in text
    assert "rank 1 is slower than the others" in text and "…" not in text
    assert not list(folder.glob(".*.tmp"))


def test_a_run_that_has_ended_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run([str(folder), "--once"]) == 1
    assert "the run is not running" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not a run's folder"):
        top.run([str(tmp_path)])
    with pytest.raises(ValueError, match="there is no run in runs/"):
        top.run([])


def test_a_damaged_file_is_no_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"ranks"')
    assert read_live(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_live(tmp_path / "missing", states())


def test_a_watched_run_says_what_it_does_and_removes_the_file_at_the_end(tmp_path: Path) -> None:
    world = World()
    with HangWatch(world, tmp_path, hang_timeout=2, timeout=60, ends_process=False):
        world.activity.finish_step(7, on_gpu=False)
        deadline = time.monotonic() + 60
        while (live := read_live(tmp_path)) is None or live["ranks"][0]["step"] != 7:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert live["ranks"][0]["phase"] == "step" and live["ranks"][0]["memory"] > 10_000_000
    assert not (tmp_path / FILE).exists()


def test_the_load_of_a_cpu_is_the_memory_of_the_process() -> None:
    load = device_load(torch.device("cpu"))
    assert 10_000_000 < load.memory < load.memory_total and load.utilization is None
