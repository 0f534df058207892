"""Hangs and stragglers with NCCL: the host runs ahead of a GPU that is stuck."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine import lines
from multi.ranks import free_port
from multi.test_hang import HANG_STATUS, SLOW, script

FLAGS = ["--hang_timeout", "5", "--precision", "fp32", "--compile", "off", "--num_workers", "1", "--out", "here"]


def ranks(folder: Path, *flags: str) -> list[tuple[int, str]]:
    """Train with two NCCL ranks on one GPU; return the exit status of each, and what it has printed to stderr."""
    started, port = [], str(free_port())
    paths = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parents[2])))
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "PYTHONPATH": paths}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "train.py", *FLAGS, *flags]
        started.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=200)[1] for rank in started]
    return [(rank.returncode, text) for rank, text in zip(started, printed, strict=True)]


def test_a_rank_whose_host_is_stuck_is_named(tmp_path: Path) -> None:
    script(tmp_path, "def at(self, step):\n    if RANK == 1 and step == 12:\n        stuck()")
    ended = ranks(tmp_path)
    assert [status for status, _ in ended] == [HANG_STATUS] * 2, ended
    seconds = (tmp_path / "here/hang.txt").stat().st_mtime - float((tmp_path / "since").read_text())
    print(f"from the hang to its diagnosis: {seconds:.1f} s, with --hang_timeout 5")
    assert re.search(r"rank 1 is stuck in step 13 at .*train.py:\d+ in stuck", ended[0][1]), ended
    assert re.search(r"rank 0 (waits in all_reduce|is in backward)", ended[0][1]), ended


def test_a_collective_that_only_one_gpu_is_in_is_reported(tmp_path: Path) -> None:
    body = """
def model(self):
    self.group = dist.new_group()
    return super().model()

def at(self, step):
    if step == 12 and RANK == 1:
        dist.all_reduce(torch.ones(1, device="cuda"), group=self.group)
"""
    script(tmp_path, body)
    ended = ranks(tmp_path)
    assert [status for status, _ in ended] == [HANG_STATUS] * 2, ended
    said = ended[0][1]
    print(said)
    assert re.search(r"rank \d.* (waits for its GPU, which has not finished|waits in|is in backward)", said), ended


@pytest.mark.parametrize("cause", SLOW)
def test_a_straggler_is_named(tmp_path: Path, cause: str) -> None:
    script(tmp_path, SLOW[cause])
    ended = ranks(tmp_path, "--hang_timeout", "60", "--n_steps", "20")
    assert [status for status, _ in ended] == [0, 0], ended
    logged = [line for line in lines(tmp_path / "here") if "straggler" in line]
    assert len(logged) >= 2 and all(line["straggler"] == 1 for line in logged[1:]), logged
