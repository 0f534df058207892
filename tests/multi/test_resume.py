"""Through any interruption: killed, signalled, restarted, on another world; the run ends as if nothing had been."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tiny
import torch
from engine import lines, train
from processes import environment, process_of

from lockstep import checkpoint
from lockstep.distributed import World
from multi.test_launch import TINY, run, started, wait_for

LONG = ["--size", "331", "--global_batch_size", "24", "--ema_decay", "0.99", "--schedule", "cosine", "--log_every", "7"]


def end_of(folder: Path, steps: int) -> Path:
    return folder / "checkpoints" / f"step-{steps:08d}"


def assert_same_end(a: Path, b: Path, steps: int) -> None:
    """Weights, averages and optimizer, to the bit."""
    for file in ("model.safetensors", "ema-0.99.safetensors", "optimizer.safetensors"):
        assert (end_of(a, steps) / file).read_bytes() == (end_of(b, steps) / file).read_bytes(), file


def ranks_of(launcher: int) -> list[int]:
    """The process ids of the ranks that a process has started by commands of the zygote."""
    return [process_of(int(p)) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_and_resumed_it_ends_the_same(tmp_path: Path) -> None:
    steps = 240
    flags = [*LONG, "--n_steps", str(steps), "--save_every", "3", "--keep", "2", "--nproc", "2"]
    assert run(["lockstep", "train", TINY, *flags, "--out", "whole"], tmp_path).returncode == 0
    chance = random.Random(0)
    killed = 0
    for attempt in range(6):
        command = ["lockstep", "train", TINY, *flags, "--out", "parts", "--resume", "auto"]
        process = started(command, tmp_path)
        wait_for(process, "  loss ")
        deadline = time.monotonic() + chance.random() * 0.5
        while time.monotonic() < deadline and process.poll() is None:
            os.sched_yield()
        if process.poll() is not None:
            break
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            launcher = process_of(process.pid)
            victims = ranks_of(launcher)
            for victim in victims[:1] if attempt % 2 else [*victims, launcher]:
                os.kill(victim, signal.SIGKILL)
            killed += 1
        process.communicate(timeout=300)
    done = run(["lockstep", "train", TINY, *flags, "--out", "parts", "--resume", "auto"], tmp_path)
    assert done.returncode == 0 or "nothing left to do" in done.stderr, done.stderr
    assert killed >= 3
    assert_same_end(tmp_path / "whole", tmp_path / "parts", steps)
    proven = [x["epochs_proven"] for x in lines(tmp_path / "parts") if "epochs_proven" in x][-1]
    assert proven == steps * 24 // 331


def stopped_halfway(world: World, flags: list[str], at: int) -> None:
    """A run that ends after step `at`, as by a signal."""
    from engine import trainer

    halted = trainer(world, "Labelled", flags)
    step = halted.train_step

    def last() -> None:
        if halted.progress.step + 1 == at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        step()

    halted.train_step = last  # type: ignore[method-assign]
    outcome = halted.fit()
    assert (outcome.step, outcome.stopped_by) == (at, "SIGTERM")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (4, 2)])
def test_resumed_on_another_world_it_ends_the_same(ranks, tmp_path: Path, before: int, after: int) -> None:
    flags = [*LONG, "--precision", "fp64", "--n_steps", "60", "--batch_size", "24"]
    alone = train(World(), "Labelled", [*flags, "--out", str(tmp_path / "whole")])
    parts = [*flags, "--out", str(tmp_path / "parts")]
    if before == 1:
        stopped_halfway(World(), parts, 37)
    else:
        ranks(before)(stopped_halfway, parts, 37)
    resume = ["--resume", str(tmp_path / "parts")]
    weights = train(World(), "Labelled", resume) if after == 1 else ranks(after)(train, "Labelled", resume)[0]
    for name, tensor in alone.items():
        assert (weights[name] - tensor).norm() <= 1e-9 * tensor.norm(), name
    proven = [x["epochs_proven"] for x in lines(tmp_path / "parts") if "epochs_proven" in x]
    assert proven[-1] == 60 * 24 // 331


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path: Path) -> None:
    steps = 120
    flags = [*LONG, "--n_steps", str(steps), "--save_every", "5", "--keep", "2", "--nproc", "2"]
    assert run(["lockstep", "train", TINY, *flags, "--out", "whole"], tmp_path).returncode == 0
    process = started(["lockstep", "train", TINY, *flags, "--out", "parts", "--max_restarts", "3"], tmp_path)
    wait_for(process, "step 35/")
    os.kill(ranks_of(process_of(process.pid))[1], signal.SIGKILL)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "were restarted" in rest and "resumes" in rest
    assert_same_end(tmp_path / "whole", tmp_path / "parts", steps)


@pytest.mark.slow
def test_torchrun_restarts_find_their_run_without_being_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from tiny import Tiny\nfrom lockstep import train\nif __name__ == '__main__':\n    train(Tiny)\n"
    )
    flags = [*LONG, "--n_steps", "150", "--save_every", "5"]
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=3", "train.py", *flags]
    process = started(command, tmp_path)
    wait_for(process, "step 35/")
    os.kill(ranks_of(process_of(process.pid))[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (folder,) = (tmp_path / "runs/tiny").iterdir()
    assert "resumes" in json.loads((folder / "receipt.json").read_text())
    assert end_of(folder, 150).exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_schedulers_signal_saves_and_asks_for_a_requeue(tmp_path: Path, kind: signal.Signals, nproc: str) -> None:
    process = started(["lockstep", "train", TINY, "--n_steps", "1000000", "--nproc", nproc, "--out", "here"], tmp_path)
    wait_for(process, "step 10/")
    process.send_signal(kind)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert f"stopped by {kind.name}" in rest
    assert checkpoint.newest(tmp_path / "here/checkpoints", print) is not None


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_end(tmp_path: Path) -> None:
    command = ["lockstep", "train", TINY, "--n_steps", "1000000", "--nproc", "2", "--out", "here"]
    process = started(command, tmp_path, real=True)
    wait_for(process, "step 10/")
    process.kill()
    process.communicate(timeout=300)  # the ranks hold the pipe: it closes with the last of them


@pytest.mark.slow
def test_a_stopped_rank_whose_launcher_was_killed_ends_too(tmp_path: Path) -> None:
    """It cannot notice anything itself: a rank that does makes it go on."""
    command = ["lockstep", "train", TINY, "--n_steps", "1000000", "--nproc", "2", "--out", "here"]
    process = started(command, tmp_path)
    wait_for(process, "step 10/")
    launcher = process_of(process.pid)
    os.kill(ranks_of(launcher)[1], signal.SIGSTOP)
    os.kill(launcher, signal.SIGKILL)
    process.communicate(timeout=60)  # the ranks hold the pipe: it closes with the last of them


KILLS_ITS_LAUNCHER = """
import atexit
import os
import signal
import time
from tiny import Tiny

class Killing(Tiny):
    name = "killing"

def kill():
    if os.environ.get("RANK") == "0":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.3)

"""


@pytest.mark.parametrize("when", ["kill()", "atexit.register(kill)"])
def test_ranks_whose_launcher_was_killed_at_the_start_or_the_end_leave_nothing(tmp_path: Path, when: str) -> None:
    (tmp_path / "killing.py").write_text(KILLS_ITS_LAUNCHER + when)
    (tmp_path / "tmp").mkdir()
    flags = ["--nproc", "2", "--n_steps", "2", "--out", "here", "--timeout", "600"]
    command = ["lockstep", "train", "killing.py:Killing", *flags]
    process = started(command, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    process.communicate(timeout=300)  # less than --timeout; the ranks hold the pipe
    assert process.returncode == -signal.SIGKILL
    assert not list((tmp_path / "tmp").iterdir())


def test_resume_reads_no_data_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run stands follows from its step: the first batch after step 10,000 costs as much as the first."""
    flags = ["--n_steps", "4", "--save_every", "0", "--out", str(tmp_path / "run")]
    train(World(), "Tiny", flags)
    saved = checkpoint.load(end_of(tmp_path / "run", 4))
    later = checkpoint.Checkpoints(tmp_path / "far/checkpoints")
    ledger = {"complete": 0, "books": {}}
    progress = {**saved.state["progress"], "step": 10_000_000}
    later.save(10_000_000, saved.tensors, {**saved.state, "progress": progress, "ledger": ledger})
    later.wait()
    read: list[int] = []
    original = tiny.Points.__getitem__
    monkeypatch.setattr(tiny.Points, "__getitem__", lambda self, i: read.append(i) or original(self, i))
    from engine import trainer

    run_on = trainer(World(), "Tiny", ["--resume", str(tmp_path / "far"), "--n_steps", "10000001"])
    run_on.train_step()
    assert run_on.progress.step == 10_000_000 and len(read) == 8


def test_environment_is_clean() -> None:
    assert "RANK" not in environment() and torch.get_default_dtype() == torch.float32
