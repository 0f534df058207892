"""The SLURM job and SLURM's variables, with an `srun` and an `scontrol` that do what theirs do."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from multi.test_launch import TINY, wait_for
from processes import ROOT, environment

from lockstep.audit.launcher import free_port
from lockstep.cluster import adopt, first_host, from_slurm

SRUN = """#!/bin/bash
# Runs a command once for each task; passes SIGTERM on; exits with the highest status.
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_NODELIST=localhost SLURM_PROCID=$task \\
        SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
worst=0
for task in "${tasks[@]}"; do
    while :; do
        wait "$task"
        status=$?
        kill -0 "$task" 2>/dev/null || break
    done
    ((status > worst)) && worst=$status
done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$REQUEUED"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder whose bin/ comes first on PATH."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def job(cluster: Path, tasks: int, *words: str) -> subprocess.Popen[str]:
    """Start the job file with one rank for each task."""
    variables = environment(
        SLURM_NTASKS=str(tasks), SLURM_JOB_ID="77", SLURM_JOB_NODELIST="localhost", SLURM_PROCID="0",
        MASTER_PORT=str(free_port()), REQUEUED=str(cluster / "requeued"),
    )  # fmt: skip
    variables["PATH"] = f"{cluster / 'bin'}{os.pathsep}{variables['PATH']}"
    command = ["bash", str(ROOT / "deploy/slurm/train.sbatch"), TINY, "--out", "here", *words]
    return subprocess.Popen(
        command, cwd=cluster, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    return said


@pytest.mark.slow
def test_a_job_that_is_stopped_is_requeued_and_continues_on_another_number_of_ranks(cluster: Path) -> None:
    process = job(cluster, 2, "--n_steps", "1000000", "--log_every", "5", "--global_batch_size", "16")
    said = wait_for(process, "  loss ")
    process.send_signal(signal.SIGTERM)
    said += ended(process)
    assert process.returncode == 75, said
    assert (cluster / "requeued").read_text().split() == ["requeue", "77"]
    receipt = json.loads((cluster / "here/receipt.json").read_text())
    assert receipt["launches"][0]["world"] == 2
    (step,) = {int(path.name[5:]) for path in (cluster / "here/checkpoints").glob("step-*")}
    process = job(cluster, 1, "--n_steps", str(step + 3))
    said = ended(process)
    assert process.returncode == 0, said
    receipt = json.loads((cluster / "here/receipt.json").read_text())
    assert [launch["world"] for launch in receipt["launches"]] == [2, 1]
    assert (cluster / "here/model.pth").exists() and (cluster / "requeued").read_text().count("requeue") == 1


@pytest.mark.slow
def test_a_job_that_fails_is_not_requeued(cluster: Path) -> None:
    process = job(cluster, 2, "--n_steps", "10", "--size", "3")
    said = ended(process)
    assert process.returncode == 2 and "the training set has 3 samples" in said, said
    assert not (cluster / "requeued").exists()


STEP = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip


def test_the_variables_of_a_task_become_those_of_torchrun() -> None:
    found = from_slurm(STEP)
    assert found == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20000 + 12345 % 12000),
    }  # fmt: skip
    assert from_slurm(STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != found["MASTER_PORT"], "steps of one job"
    uneven = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4,1(x2)", "SLURM_NODEID": "0"}
    assert from_slurm(uneven)["LOCAL_WORLD_SIZE"] == "4"
    assert from_slurm(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "7"})["MASTER_ADDR"] == "head"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[003-005,009]", "gpu003"),
        ("a1,b2", "a1"),
        ("n[7,9]-ib,x", "n7-ib"),
        ("r[1-2]n[3,5],y", "r1n3"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_only_a_task_of_several_is_a_rank() -> None:
    for other in (
        {},
        {key: STEP[key] for key in STEP if key != "SLURM_STEP_ID"},  # the batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"RANK": "0"},  # started by torchrun
    ):
        before = dict(other)
        adopt(other, "1")
        assert other == before
    adopted = dict(STEP)
    adopt(adopted, "1")
    assert adopted["RANK"] == "5"


def test_processes_in_every_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"srun has started 6 tasks.*--nproc 8 would start more.*--ntasks-per-node"):
        adopt(dict(STEP), "8")
