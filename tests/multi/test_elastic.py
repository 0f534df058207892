"""Nodes that come and go: `torchrun --nnodes=1:2`, two agents on this machine, each a node to the other."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine import lines, train
from processes import environment, process_of

from lockstep import checkpoint
from lockstep.distributed import World
from multi.ranks import free_port
from multi.test_resume import ranks_of

FLAGS = ["--size", "331", "--exact", "--batch_size", "6", "--global_batch_size", "24"]
FLAGS += ["--log_every", "10", "--save_every", "10"]
STEPS = 200


def until(said: Callable[[], bool], agent: subprocess.Popen[bytes]) -> None:
    """Wait for something to be so, while the job goes on."""
    deadline = time.monotonic() + 300
    while not said():
        assert agent.poll() is None, "the job has ended"
        assert time.monotonic() < deadline, "it never came"
        threading.Event().wait(0.05)


def node(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """An agent with two ranks that takes part in the job."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"]
    patience = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    command = ["torchrun", "--nnodes=1:2", "--nproc_per_node=2", "--max-restarts=3", *rendezvous, patience, "train.py"]
    return subprocess.Popen(
        [*command, *FLAGS, "--n_steps", str(STEPS)],
        cwd=folder,
        env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=(folder / "nodes.log").open("ab"),
        stderr=subprocess.STDOUT,
    )


SCRIPT = """
import time
from tiny import Labelled
from lockstep import train

class Slow(Labelled):
    def loss(self, model, batch, rng):
        time.sleep(0.03)  # so that it is still at work when another node has come
        return super().loss(model, batch, rng)

if __name__ == "__main__":
    train(Slow)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_node_joins_and_is_lost_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = train(World(), "Labelled", [*FLAGS, "--n_steps", str(STEPS), "--out", str(tmp_path / "whole")])
    port = free_port()
    first = node(tmp_path, port)
    second = None
    log, runs = tmp_path / "nodes.log", tmp_path / "runs/labelled"

    def world() -> str:
        return "".join(json.loads(receipt.read_text())["world"][:1] for receipt in runs.glob("*/receipt.json"))

    try:
        until(lambda: "step 30/" in log.read_text(), first)
        assert world() == "2"
        second = node(tmp_path, port)
        until(lambda: world() == "4" and "  loss " in log.read_text().partition("on 4 rank(s)")[2], first)
        agent = process_of(second.pid)
        for lost in (*ranks_of(agent), agent):  # as when a machine goes dark
            os.kill(lost, signal.SIGKILL)
        until(lambda: world() == "2", first)
        assert first.wait(300) == 0, log.read_text()
    finally:
        for started in (first, second):
            if started and started.poll() is None:
                started.kill()
    (folder,) = runs.iterdir()
    assert "resumes" in json.loads((folder / "receipt.json").read_text())
    end = checkpoint.load(folder / "checkpoints" / f"step-{STEPS:08d}")
    for name, tensor in alone.items():
        assert torch.equal(end.tensors["model"][name], tensor), name
    proven = [x["epochs_proven"] for x in lines(folder) if "epochs_proven" in x]
    assert proven[-1] == STEPS * 24 // 331
