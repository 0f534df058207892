"""What a cluster says of a process in variables of its own, translated into those of torchrun.

`srun lockstep train ...` starts each rank by itself: SLURM knows their numbers, and torchrun is not needed. Kubeflow's
trainer describes the nodes for torchrun (PET_*), which then has to be started.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import NoReturn

PORTS = range(20000, 32000)
"""A step's port is one of these, by its number and its job's: those that share a node get different ones. Kernels
hand out others to connections."""


def adopt(environment: MutableMapping[str, str], nproc: str) -> None:
    """Set torchrun's variables in a process that SLURM has started as one of several ranks; otherwise change nothing.

    Only in a job step (`srun`): the batch script itself is one process, whatever the number of tasks.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or tasks == 1:
        return
    if nproc != "1":
        raise ValueError(
            f"srun has started {tasks} tasks, and each is one rank; --nproc {nproc} would start more in each of them: "
            f"leave it out and give srun --ntasks-per-node, or start torchrun with one task per node (deploy/slurm)"
        )
    environment.update(from_slurm(environment))


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of a job step."""
    first = first_host(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    port = PORTS[(int(environment["SLURM_JOB_ID"]) + 1009 * int(environment["SLURM_STEP_ID"])) % len(PORTS)]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_on_node(environment)),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's short form of a list: `gpu[03-05,09],login1` is gpu03."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)  # up to a comma that is not within brackets
    if first is None:
        raise ValueError(f"SLURM's list of nodes cannot be read: {nodes!r}; set MASTER_ADDR to the first node")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Return how many tasks of the step are on this node: `2(x3),1` is 2, 2, 2 and 1."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", "0")), len(counts) - 1)]


def wants_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether Kubeflow's trainer has described several processes for a torchrun that was not started."""
    if "RANK" in environment or "PET_MASTER_ADDR" not in environment:
        return False
    return environment.get("PET_NNODES", "1") != "1" or environment.get("PET_NPROC_PER_NODE", "1") != "1"


def become_torchrun(command: list[str]) -> NoReturn:
    """Replace this process by torchrun, which reads PET_* by itself; `command` is what follows `python`."""
    words = [sys.executable, "-m", "torch.distributed.run", *(command[1:] if command[0] == "-m" else command)]
    if command[0] == "-m":
        words.insert(3, "-m")
    os.execv(sys.executable, words)
