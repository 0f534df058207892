"""A run that hangs: who is stuck and where, within seconds of the time-out; and what is slow is not called stuck."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from engine import lines
from processes import process_of

from multi.ranks import free_port
from multi.test_launch import alive, run, started, wait_for
from multi.test_resume import end_of, ranks_of

pytestmark = pytest.mark.slow

HANG_STATUS = 76
SCRIPT = """
import os, re, time
from pathlib import Path
import torch
import torch.distributed as dist
from tiny import Points, Terms, Tiny, WithBatchNorm
from lockstep import train

RANK = int(os.environ.get("RANK", 0))

def stuck():
    Path("since").write_text(str(time.time()))
    while True:
        time.sleep(0.01)

class Mine(BASE):
    name = "mine"

    def loss(self, model, batch, rng):
        if model.training:
            self.at(self.calls - 2 * (int(os.environ.get("WORLD_SIZE", 1)) > 1))  # DDP's warm-up takes two calls
        return super().loss(model, batch, rng)

    def at(self, step):
        pass

BODY

if __name__ == "__main__":
    train(Mine)
"""


def script(folder: Path, body: str, base: str = "Tiny") -> None:
    """A script whose class `Mine` has these methods; `at(step)` is called in the loss, steps counted from 0."""
    methods = "\n".join(f"    {line}" for line in body.splitlines())
    (folder / "train.py").write_text(SCRIPT.replace("BODY", methods).replace("BASE", base))


def hung(folder: Path, nproc: int, *flags: str, status: int = HANG_STATUS) -> str:
    """Train until the run ends, and return what it has printed to stderr; print how long it took to see the hang."""
    done = run(["python", "train.py", "--nproc", str(nproc), "--hang_timeout", "2", "--out", "here", *flags], folder)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not alive(folder), done.stderr
    if (folder / "since").exists():
        seconds = (folder / "here/hang.txt").stat().st_mtime - float((folder / "since").read_text())
        print(f"from the hang to its diagnosis: {seconds:.1f} s, with --hang_timeout 2")
    return done.stderr


STUCK_AT_12 = "def at(self, step):\n    if RANK == 1 and step == 12:\n        stuck()"


def test_a_rank_in_an_endless_loop_is_named_with_its_line_and_where_the_others_wait(tmp_path: Path) -> None:
    script(tmp_path, STUCK_AT_12)
    said = hung(tmp_path, 2)
    assert re.search(r"rank 1 is stuck in step 12 at .*train.py:\d+ in stuck: time.sleep\(0.01\)", said), said
    assert re.search(r"rank 0 is in backward \(DDP sums the gradients there\) at .*step.py:\d+", said), said
    report = (tmp_path / "here/hang.txt").read_text()
    assert (
        report.count("thread MainThread") == 2 and report.count("in at\n") == 1 and "lockstep-hang-watch" not in report
    )
    assert "the run hangs" in (tmp_path / "here/log.txt").read_text()


def test_the_agent_restarts_a_run_that_hangs(tmp_path: Path) -> None:
    body = 'def at(self, step):\n    if RANK == 1 and step == 12 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":'
    script(tmp_path, f"{body}\n        stuck()")
    hung(tmp_path, 2, "--save_every", "5", "--max_restarts", "1", status=0)
    assert end_of(tmp_path / "here", 20).exists() and (tmp_path / "here/hang.txt").exists()


def test_ranks_in_different_collectives_are_named_with_both(tmp_path: Path) -> None:
    body = """
def model(self):
    self.groups = [dist.new_group(backend="gloo") for _ in range(2)]
    return super().model()

def at(self, step):
    if step == 12 and RANK == 0:
        Path("since").write_text(str(time.time()))
        dist.all_reduce(torch.ones(1), group=self.groups[0])
    if step == 12 and RANK == 1:
        dist.broadcast(torch.ones(1), src=0, group=self.groups[1])
"""
    script(tmp_path, body)
    said = hung(tmp_path, 2)
    assert "the ranks wait in different collectives:" in said
    assert re.search(r"rank 0 waits in all_reduce at .*train.py:\d+ in at\n", said), said
    assert re.search(r"rank 1 waits in broadcast at .*train.py:\d+ in at\n", said), said


def test_a_collective_that_only_one_rank_calls_is_named(tmp_path: Path) -> None:
    script(tmp_path, "def at(self, step):\n    if RANK == 1 and step == 12:\n        dist.monitored_barrier()")
    said = hung(tmp_path, 2)
    assert re.search(r"rank 1 waits in monitored_barrier at .*train.py:\d+ in at\n", said), said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_by_the_others_and_killed(tmp_path: Path, victim: int) -> None:
    script(tmp_path, "def at(self, step):\n    time.sleep(0.05)")
    command = ["python", "train.py", "--nproc", "2", "--hang_timeout", "2", "--n_steps", "100000", "--out", "here"]
    process = started(command, tmp_path)
    wait_for(process, "step 10/")
    stopped = ranks_of(process_of(process.pid))[victim]
    os.kill(stopped, signal.SIGSTOP)
    since = time.time()
    _, said = process.communicate(timeout=300)
    print(f"from the hang to the end of the run: {time.time() - since:.1f} s")
    assert process.returncode == HANG_STATUS, said
    assert f"rank {victim} does not respond: process {stopped} is stopped" in said, said
    assert f"rank {1 - victim} is in backward" in said or f"rank {1 - victim} waits in all_reduce" in said, said
    assert not alive(tmp_path)


def test_a_rank_whose_store_does_not_answer_ends_by_itself(tmp_path: Path) -> None:
    """Without an agent, the store is in the process of rank 0."""
    script(tmp_path, "def at(self, step):\n    time.sleep(0.05)")
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["python", "train.py", "--hang_timeout", "2", "--n_steps", "100000", "--out", "here"]
    first, second = (started(command, tmp_path, RANK=str(r), LOCAL_RANK=str(r), **group) for r in range(2))
    try:
        wait_for(first, "step 10/")
        os.kill(process_of(first.pid), signal.SIGSTOP)
        _, said = second.communicate(timeout=300)
    finally:
        os.kill(process_of(first.pid), signal.SIGKILL)
        first.communicate(timeout=300)
    assert second.returncode == HANG_STATUS and re.search(r"the store at .* has not answered for \d+ s", said), said
    assert not alive(tmp_path)


def test_a_rank_that_holds_the_gil_is_named_with_its_line(tmp_path: Path) -> None:
    body = "def at(self, step):\n    if RANK == 1 and step == 12:"
    script(
        tmp_path,
        f"{body}\n        Path('since').write_text(str(time.time()))\n        re.match('(a+)+$', 'a' * 60 + 'b')",
    )
    said = hung(tmp_path, 2)
    assert re.search(r"rank 1 does not respond since .* at .*train.py:\d+ in at: its code holds the GIL", said), said
    assert re.search(r'train.py", line \d+ in at', (tmp_path / "here/hang.txt").read_text())


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loader_that_delivers_nothing_is_named_as_such(tmp_path: Path, nproc: int) -> None:
    body = f"""
def dataset(self, split):
    points = super().dataset(split)
    original, self.fetched = type(points).__getitem__, 0

    class Sleepy(Points):
        def __getitem__(inner, i):
            self.fetched += 1
            if RANK == {nproc - 1} and split == "train" and self.fetched > 150:
                time.sleep(10_000)
            return original(inner, i)

    return Sleepy()
"""
    script(tmp_path, body)
    said = hung(tmp_path, nproc, "--num_workers", "1", "--n_steps", "1000")
    assert re.search(rf"rank {nproc - 1} waits for data in step \d+ at .*loader.py:\d+", said), said


def test_a_single_process_that_is_stuck_is_reported_and_ended(tmp_path: Path) -> None:
    script(tmp_path, STUCK_AT_12.replace("RANK == 1", "RANK == 0"))
    said = hung(tmp_path, 1)
    assert re.search(r"rank 0 is stuck in step 13 at .*train.py:\d+ in stuck", said), said


def test_a_stuck_evaluation_is_named_after_a_longer_time(tmp_path: Path) -> None:
    body = "def loss(self, model, batch, rng):\n    if RANK == 1 and not model.training:\n        stuck()"
    script(tmp_path, f"{body}\n    return super().loss(model, batch, rng)")
    said = hung(tmp_path, 2, "--hang_timeout", "1", "--eval_every", "10")
    assert re.search(r"rank 1 is stuck in evaluation after step 10 at .*train.py:\d+ in stuck", said), said
    assert "rank 0 waits in gather_object" in said, said


def test_slow_steps_are_not_called_a_hang(tmp_path: Path) -> None:
    """One is slower than the time-out, but not by far when compared with those before."""
    script(tmp_path, "def at(self, step):\n    time.sleep({3: 1.2, 4: 1.2, 5: 3.0}.get(step, 0) * (RANK == 1))")
    assert hung(tmp_path, 2, "--n_steps", "7", status=0) == ""
    assert not (tmp_path / "here/hang.txt").exists()


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    """As by Ctrl-Z, in the middle of a step."""
    body = ["time.sleep(0.5)", "print('halfway', step, flush=True)", "time.sleep(0.3)", "time.sleep(0.3)"]
    script(tmp_path, "\n    ".join(["def at(self, step):", *body]))
    command = ["python", "train.py", "--hang_timeout", "2", "--n_steps", "3", "--out", "here"]
    process = started(command, tmp_path)
    wait_for(process, "halfway 1")
    os.kill(process_of(process.pid), signal.SIGSTOP)
    threading.Event().wait(4)
    os.kill(process_of(process.pid), signal.SIGCONT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and said == "", said


SLOW = {
    "compute": "def at(self, step):\n    time.sleep(0.2 * (RANK == 1))",
    "data": "def collate(self, items):\n    time.sleep(0.2 * (RANK == 1))\n    return super().collate(items)",
}


@pytest.mark.parametrize(("cause", "base"), [("compute", "Tiny"), ("compute", "WithBatchNorm"), ("data", "Terms")])
def test_a_straggler_is_named_with_the_share_of_lost_time(tmp_path: Path, cause: str, base: str) -> None:
    """Also where all ranks wait for it in the middle of their step."""
    script(tmp_path, SLOW[cause], base)
    done = run(["python", "train.py", "--nproc", "2", "--n_steps", "20", "--out", "here"], tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.findall(
        r"rank (\d) is slower than the others: (\d+) ms more per step than their \d+ ms \((.*?)\)", done.stdout
    )
    reason = {"compute": "its own computation takes longer", "data": "it waits for data"}[cause]
    assert [(rank, why) for rank, _, why in said] == [("1", reason)] and int(said[0][1]) >= 160, done.stdout
    logged = [line for line in lines(tmp_path / "here") if "straggler" in line]
    assert len(logged) >= 3 and all(line["straggler"] == 1 and line["straggler_lost_share"] > 0.4 for line in logged)
