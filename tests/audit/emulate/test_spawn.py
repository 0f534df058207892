"""Ranks that a script starts itself are distinguished from its other processes."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group as join_group

from audit.test_command import TRAIN, audit, names
from lockstep.audit.emulate.spawn import _joins_group

launching = ModuleType("launching")


def setup(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank)


launching.setup = setup  # type: ignore[attr-defined]
package = ModuleType("package")
package.launching = launching  # type: ignore[attr-defined]


def train(rank: int) -> None:
    setup(rank)


def by_module(rank: int) -> None:
    launching.setup(rank)


def by_package(rank: int) -> None:
    package.launching.setup(rank)


def by_method(rank: int) -> None:
    trainer = Trainer(rank)
    trainer.begin(rank)


def by_another_name(rank: int) -> None:
    join_group("gloo", rank=rank)


def nested() -> Any:
    def begin(rank: int) -> None:
        setup(rank)

    def work(rank: int) -> None:
        begin(rank)

    return work


def serve(queue: Any) -> None:
    net = nn.Linear(2, 2).train(False)  # not the function of this name
    net.load_state_dict(queue.get())


class Trainer:
    def __init__(self, world: int):
        self.world = world

    def begin(self, rank: int) -> None:
        setup(rank)

    def run(self, rank: int) -> None:
        self.begin(rank)

    def report(self) -> None:
        print(self.world)


def makes_one(rank: int) -> None:
    Whole(rank)


class Whole:
    def __init__(self, rank: int):
        train(rank)


@dataclass
class Monitor:
    """Compared by what it holds, so that it has no hash."""

    every: float

    def __call__(self) -> None:
        pass


RANKS = {
    "a function": train,
    "one of a module": by_module,
    "one of a module in a package": by_package,
    "a partial": partial(partial(train), 1),
    "a method": Trainer(2).run,
    "one that makes an object": makes_one,
    "one that calls its method": by_method,
    "one by another name": by_another_name,
    "one within another": nested(),
}
OTHERS = {
    "a function": serve,
    "a method": Trainer(2).report,
    "an object": Monitor(0.1),
    "one of Python's": print,
    "another": sys.exit,
    "nothing": None,
    "a partial": partial(print, "done"),
}


@pytest.mark.parametrize("task", RANKS)
def test_a_task_that_joins_a_group_is_a_rank(task: str) -> None:
    assert _joins_group(RANKS[task])


@pytest.mark.parametrize("task", OTHERS)
def test_a_task_that_joins_no_group_is_none(task: str) -> None:
    assert not _joins_group(OTHERS[task])


@pytest.mark.slow
def test_ranks_that_are_started_a_second_time_are_audited_too(tmp_path: Path) -> None:
    one = TRAIN.replace("model(a)", "(model.module if around else model)(a)").replace(
        'dist.init_process_group("gloo")', 'dist.init_process_group("gloo", rank=rank, world_size=2)'
    )
    indented = one.replace("\n    ", "\n        ").replace("range(3)", "range(1)")
    script = (
        "    import multiprocessing\n    def work(rank, around):\n"
        f"{indented}\n        dist.destroy_process_group()\n"
        "    if __name__ == '__main__':\n        for around in (False, True):\n"
        "            ranks = [multiprocessing.Process(target=work, args=(rank, around)) for rank in range(2)]\n"
        "            for process in ranks:\n                process.start()\n"
        "            for process in ranks:\n                process.join()\n"
    )
    done = audit(tmp_path, script, "--steps", "0")
    assert "unsynchronised" in names(tmp_path), done.stdout


@pytest.mark.slow
def test_processes_that_a_rank_spawns_later_are_not_ranks(tmp_path: Path) -> None:
    prepared = """if rank == 0:
        mp.spawn(prepare, nprocs=4)
    dist.barrier()
    x = torch.cat([torch.load(f"{shard}.pt") for shard in range(4)]) + torch.arange(64.0).view(32, 2)"""
    train = TRAIN.replace("x = torch.arange(64.0).view(32, 2)", prepared).replace("\n    ", "\n        ")
    script = f"""
    import torch
    import torch.multiprocessing as mp
    def prepare(shard):
        torch.save(torch.full((8, 2), float(shard)), f"{{shard}}.pt")
    def main():
        {train}
    if __name__ == "__main__":
        main()
    """
    done = audit(tmp_path, script, "--steps", "0")
    assert done.returncode == 0 and names(tmp_path) == [], done.stdout + done.stderr
