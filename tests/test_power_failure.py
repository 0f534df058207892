"""Nothing that was saved is lost when the power fails, at whichever system call it does."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from engine import train
from powercut import Disk, restore
from test_checkpoint import check, content

from lockstep import rundir
from lockstep.checkpoint import Checkpoints, newest
from lockstep.config import Run
from lockstep.distributed import World
from lockstep.flags import read_yaml

Save = Callable[[Checkpoints], None]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder without a disk behind it: thousands of flushes cost nothing there, and the model is what counts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def save(step: int, best: bool = False) -> Save:
    def act(checkpoints: Checkpoints) -> None:
        checkpoints.save(step, content(step), {"step": step}, best=best)
        checkpoints.wait()
        assert checkpoints.failure() is None

    return act


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param([save(1)], id="the first one"),
        pytest.param([save(1), save(2)], id="a second one"),
        pytest.param([save(1), save(2), save(3)], id="the oldest is deleted"),
        pytest.param([save(1), save(1)], id="the same step again"),
        pytest.param([save(1, best=True), save(2), save(3)], id="the best is kept"),
        pytest.param([save(1, best=True), save(2), save(3, best=True)], id="a new best"),
    ],
)
def test_a_power_failure_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(
    memory: Path, saves: list[Save]
) -> None:
    folder = memory / "disk" / "run" / "checkpoints"
    folder.parent.mkdir(parents=True)
    checkpoints = Checkpoints(folder, keep=2)
    for before in saves[:-1]:
        before(checkpoints)
    written = checkpoints.written or 0

    def promise() -> int:
        nonlocal written
        written = max(written, checkpoints.written or 0)
        return written

    with Disk(memory / "disk", promise) as disk:
        saves[-1](checkpoints)
    assert disk.calls.count("fsync") >= 6 and len(disk.states) > 40
    for number, ((tree, at_least), when) in enumerate(disk.states.items()):
        restore(tree, memory / "after")
        _check_after_cut(memory / "after" / "run" / "checkpoints", at_least, f"state {number}, {when}")
        shutil.rmtree(memory / "after")


def _check_after_cut(folder: Path, at_least: int, when: str) -> None:
    reports: list[str] = []
    found = newest(folder, reports.append)
    assert (found.step if found else 0) >= at_least, (when, reports)
    again = Checkpoints(folder, keep=2)  # what the next launch of the run does
    if found:
        check(newest(folder, reports.append), found.step)
        best = folder / "best"
        assert not best.is_symlink() or best.is_dir(), when
    step = (found.step if found else 0) + 1
    save(step)(again)
    check(newest(folder, reports.append), step)
    assert not list(folder.glob(".*")), when


@pytest.mark.slow
def test_a_power_failure_at_any_call_of_a_run_loses_nothing_that_was_saved(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[Checkpoints] = []
    create = Checkpoints.__init__

    def created(self: Checkpoints, folder: Path, keep: int) -> None:
        writers.append(self)
        create(self, folder, keep)

    monkeypatch.setattr(Checkpoints, "__init__", created)
    (memory / "disk").mkdir()
    monkeypatch.chdir(memory / "disk")
    written = 0

    def promise() -> int:
        nonlocal written
        written = max([written, *(writer.written or 0 for writer in writers)])
        return written

    flags = ["--save_every", "2", "--lr", "0.03", "--ema_decay", "0.9"]
    with Disk(memory / "disk", promise) as disk:
        end = train(World(), "Tiny", ["--n_steps", "4", "--keep", "1", *flags])
    monkeypatch.setattr(Checkpoints, "__init__", create)
    (run,) = Path("runs/tiny").iterdir()
    settings = read_yaml(run / "config.yaml")
    resumed: dict[int, int] = {}
    for (tree, at_least), when in disk.states.items():
        restore(tree, memory / "after")
        monkeypatch.chdir(memory / "after")
        reports: list[str] = []
        found = newest(run / "checkpoints", reports.append)
        assert (found.step if found else 0) >= at_least, (when, reports)
        if found:
            assert rundir.resolve_run_dir(Run(resume="latest"), "tiny", World()).resume_from == found.path, when
            config = rundir.find_config("latest", None, tiny.Tiny)
            assert config and read_yaml(config) == settings, when
        if found and found.step < 4 and resumed.setdefault(found.step, 0) < 3:
            resumed[found.step] += 1
            weights = train(World(), "Tiny", ["--resume", "latest"])
            assert all((weights[name] == tensor).all() for name, tensor in end.items()), when
        monkeypatch.chdir(memory)
        shutil.rmtree(memory / "after")
    assert resumed == {2: 3} and len(disk.states) > 300
