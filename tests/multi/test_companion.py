"""`lockstep run`: scripts that know nothing of it, started, watched and ended as its page says."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.distributed import World
from lockstep.watch import OutOfLockstep
from lockstep.watch.replicas import Replicas
from multi.ranks import Ranks, free_port
from multi.test_launch import alive, run, started, wait_for

Get = Callable[[int], Ranks]

SCRIPT = """
import gc, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

what, rank = sys.argv[1], int(os.environ["RANK"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(24, 2)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(x), 2), 1):
        loss = model(batch + rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1 and step == 4:
            at_step_4(model)
        if what == "for ever":
            print("step", step, flush=True)
            while True:
                time.sleep(0.1)
    del model, optimizer, loss  # gloo may hang or abort where DDP outlives its group
    gc.collect()
    dist.destroy_process_group()
    sys.stdout.write(" ".join(["done", str(rank), *sys.argv[1:]]) + "\\n")


def at_step_4(model):
    if what == "crash":
        int("no number")
    if what == "drift":
        model.module.weight.data[0, 0] += 1e-3
    if what == "hang":
        time.sleep(1000)
    if what == "killed once" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", [["script.py"], ["--", "-m", "script"]])
def test_a_script_runs_as_it_is_and_is_said_to_be_equal(words: list[str], folder: Path) -> None:
    done = run(["lockstep", "run", "--nproc", "2", *words, "fine", "--nproc", "7"], folder)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["done 0 fine --nproc 7", "done 1 fine --nproc 7"]
    expected = "lockstep: 2 ranks, 12 optimizer steps; weights compared 4 times, last after step 10: equal"
    assert done.stderr.splitlines()[-1] == expected


@pytest.mark.slow
def test_the_traceback_of_the_rank_that_failed_first_is_last_on_the_screen(folder: Path) -> None:
    done = run(["lockstep", "run", "--nproc", "2", "script.py", "crash"], folder)
    assert done.returncode == 1
    head, _, shown = done.stderr.partition("Traceback (most recent call last):\n")
    assert "Traceback" not in head + shown and "runpy" not in shown and "companion" not in shown
    assert shown.splitlines()[0].endswith("in <module>") and shown.splitlines()[3].strip() == "at_step_4(model)"
    assert shown.splitlines()[-1] == "lockstep: rank 1: ValueError: invalid literal for int() with base 10: 'no number'"
    assert not alive(folder)


@pytest.mark.slow
def test_under_torchrun_the_cause_is_in_its_summary(folder: Path) -> None:
    command = ["torchrun", "--nproc_per_node=2", f"--master_port={free_port()}", "-m", "lockstep", "run", "script.py"]
    done = run([*command, "drift"], folder)
    said = "lockstep: after step 5 the ranks no longer hold the same weights: 1 of 2 parameters differ, first weight"
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr  # torchrun's own
    assert said in done.stderr.partition("Traceback")[0] and said in done.stderr.rpartition("Root Cause")[2]


@pytest.mark.slow
def test_a_hang_is_reported_with_the_lines(folder: Path) -> None:
    done = run(["lockstep", "run", "--nproc", "2", "--hang_timeout", "4", "script.py", "hang"], folder)
    assert done.returncode == 76, done.stderr
    assert re.search(r"rank 1 is stuck in step 5 at \S*script.py:\d+ in at_step_4: time.sleep\(1000\)", done.stderr)
    assert re.search(r"rank 0 is in backward .* at \S*script.py:\d+ in main", done.stderr), done.stderr
    assert "at_step_4" in (folder / "hang.txt").read_text() and not (folder / "log.txt").exists()
    assert not alive(folder)


@pytest.mark.slow
def test_all_ranks_start_again_when_one_was_killed(folder: Path) -> None:
    """With interpreters of their own: forked ones that leave a group of gloo in a restart were seen to hang."""
    words = ["--nproc", "2", "--max_restarts", "1", "script.py", "killed once"]
    process = started(["lockstep", "run", *words], folder, real=True)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert sorted(said.splitlines()) == ["done 0 killed once", "done 1 killed once"]
    assert "lockstep: a rank has failed; all ranks were started again (1 of 1)" in errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_rank_outlives_the_launcher(folder: Path, name: str) -> None:
    command = ["lockstep", "run", "--nproc", "2", "script.py", "for ever"]
    process = started(command, folder, real=name == "SIGKILL")
    wait_for(process, "step 1")
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=300)  # until all ranks have closed the pipe
    assert "Traceback" not in errors and process.returncode == {"SIGINT": 130, "SIGKILL": -signal.SIGKILL}[name]
    assert not alive(folder)


PLAIN = """
import os, sys
assert os.environ["WORLD_SIZE"] == "1" and __name__ == "__main__"
import beside
sys.exit(beside.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("status", "expected", "said"), [("3", 3, ""), ("'no data'", 1, "lockstep: no data\n")])
def test_one_rank_ends_as_the_script_does(status: str, expected: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/plain.py").write_text(PLAIN)
    (tmp_path / "scripts/beside.py").write_text(f"status = {status}")
    done = run(["lockstep", "run", "scripts/plain.py"], tmp_path)
    assert (done.returncode, done.stderr) == (expected, said)


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    assert "nothing to run: lockstep run" in run(["lockstep", "run"], tmp_path).stderr
    done = run(["lockstep", "run", "--nproc", "2", "missing.py"], tmp_path)
    assert done.returncode == 2 and "no script 'missing.py' in" in done.stderr
    done = run(["lockstep", "run", "script.py"], tmp_path, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 2


def compared(world: World, kind: str) -> tuple[list[str], list[int], str]:
    """What is said of a model after each of three comparisons, which were equal, and the failure."""
    torch.manual_seed(0 if kind != "own" else world.rank)
    model = nn.Linear(3, 2)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    said = list[str]()
    replicas = Replicas(world, "warn" if kind == "warned" else "stop", said.append)
    parameters = list(model.parameters())
    for step in (1, 2, 3):
        replicas.start(step, parameters if world.rank != 1 else parameters[::-1])
        if step == 1 and kind != "fine" and world.rank == 2:
            parameters[0].data[1] += 1
    try:
        replicas.finish()
    except OutOfLockstep as error:
        return said, replicas.compared, str(error)
    return said, replicas.compared, ""


def test_replicas_in_any_order_are_equal_and_a_rank_that_differs_is_named(ranks: Get) -> None:
    assert ranks(3)(compared, "fine")[0] == ([], [1, 2, 3], "")
    said, equal, failure = ranks(3)(compared, "same seed")[0]
    assert not said and equal == [1] and "those of rank 2 are not those of the others" in failure
    assert failure.startswith("after step 2 the ranks no longer hold the same weights: 1 of 2 parameters differ, first")
    (warning,), equal, failure = ranks(3)(compared, "warned")[0]
    assert not failure and equal == [1] and warning.endswith("--on_corruption warn: training continues")


def test_models_of_their_own_are_remarked_on_once_unless_ddp_holds_them(ranks: Get) -> None:
    (note,), equal, failure = ranks(3)(compared, "own")[0]
    assert not equal and not failure and "right if each rank is to train a model or a part of its own" in note
    said, equal, failure = ranks(3)(compared, "ddp")[0]
    assert not said and equal == [1] and "differ, first weight" in failure
