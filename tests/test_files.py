"""Files that a run writes: whole, and with the mode that the umask asks for."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine import train

from lockstep import agent, rundir
from lockstep.config import Run
from lockstep.distributed import World
from lockstep.files import TEMPORARY, replacing
from lockstep.runlock import RunLock


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_file_of_a_run_has_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    flags = ["--n_steps", "4", "--save_every", "2", "--eval_every", "2", "--sample_every", "2", "--ema_decay", "0.9"]
    train(World(), "Generating", [*flags, "--tensorboard", "--curves", "--out", str(tmp_path / "run")])
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if not path.is_symlink()}
    lock.release()
    assert {"model.pth", "model.safetensors", "model_ema.safetensors", "state.json", ".lock", "curves.png"} <= {
        path.name for path in modes
    }
    for path, mode in modes.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_file_that_is_replaced_keeps_its_old_content_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as temporary:
        temporary.write_text("new")
        raise ZeroDivisionError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with replacing(file) as temporary:
        torch.save({}, temporary)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() != b"old"


def test_a_resumed_run_removes_what_killed_processes_were_writing(tmp_path: Path) -> None:
    train(World(), "Generating", ["--n_steps", "2", "--sample_every", "1", "--out", str(tmp_path)])
    with replacing(tmp_path / "model.pth") as temporary:
        found = TEMPORARY.fullmatch(temporary.name)
        assert found and int(found[1]) == os.getpid()
        dead = temporary.with_name(temporary.name.replace(f".{os.getpid()}.", ".999999999."))
        dead.touch()
        (tmp_path / "samples/.unfinished").mkdir()
        with rundir.open_run_dir(Run(resume=str(tmp_path)), "tiny", World()):
            assert temporary.exists() and not dead.exists()
    train(World(), "Generating", ["--resume", str(tmp_path), "--n_steps", "3"])
    assert not list(tmp_path.rglob(".*"))


def test_the_folder_of_a_launcher_that_is_just_ending_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter([123, 123, 123])
    monkeypatch.setenv(agent.LAUNCHER, "job/123")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getppid", lambda: next(parents, 1))
    folder = tmp_path / f"{agent.log_folder_prefix('job')}x"
    folder.mkdir()
    agent.clean_up_after_launcher()
    assert folder.exists()  # it still runs
    agent.clean_up_after_launcher(patience=10)
    assert not folder.exists()
