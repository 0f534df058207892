"""Loops of one's own, on one rank and on many: the examples end alike, however often they are interrupted."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from loops import NAMES, final_state, run_example
from processes import ROOT, environment

from lockstep.audit.launcher import free_port
from lockstep.distributed import World
from multi.ranks import Ranks

Get = Callable[[int], Ranks]
KILLED_AT = {"classifier": 20, "gan": 31, "language_model": 33, "self_supervised": 20}
"""In the middle between two checkpoints."""


def assert_same_end(one: Path, other: Path, name: str, bits: bool = False) -> None:
    """Models and optimizers, to the bit or up to the rounding of float64; and whatever else was saved."""
    (tensors, state), (others, other_state) = final_state(one, name), final_state(other, name)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        distance = (tensor.double() - others[key].double()).norm().item()
        assert distance <= (0 if bits else 1e-12 + 1e-8 * tensor.double().norm().item()), key
    assert {**state, "objects": None} == {**other_state, "objects": None}


def in_folder(world: World, name: str, folder: str) -> list[str]:
    return run_example(world, name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_and_many_end_alike(name: str, tmp_path: Path, ranks: Get) -> None:
    printed = {}
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        printed[size] = (
            in_folder(World(), name, str(folder)) if size == 1 else ranks(size)(in_folder, name, str(folder))[0]
        )
    assert printed[1] and printed[1] == printed[2] == printed[3]  # metrics
    for size in (2, 3):
        assert_same_end(tmp_path / "1", tmp_path / str(size), name)


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_it_ends_the_same(name: str, tmp_path: Path, ranks: Get) -> None:
    """To the bit where it goes on with as many ranks; up to rounding with another number of them."""
    whole, again, wider = (tmp_path / folder for folder in ("whole", "again", "wider"))
    whole.mkdir()
    again.mkdir()
    in_folder(World(), name, str(whole))
    command = ["python", str(ROOT / "tests" / "loops.py"), name, str(KILLED_AT[name])]
    done = subprocess.run(command, cwd=again, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert final_state(again, name)[1]["step"] < KILLED_AT[name]
    shutil.copytree(again, wider)
    in_folder(World(), name, str(again))
    assert_same_end(whole, again, name, bits=True)
    ranks(2)(in_folder, name, str(wider))
    assert_same_end(whole, wider, name)


def test_a_killed_rank_ends_the_others_and_torchrun_resumes_the_same_bits(tmp_path: Path, ranks: Get) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    whole.mkdir()
    again.mkdir()
    ranks(2)(in_folder, "self_supervised", str(whole))
    command = ["torchrun", "--nproc_per_node=2", f"--master_port={free_port()}", str(ROOT / "tests" / "loops.py")]
    for step, status in ((20, 1), (-1, 0)):
        words = [*command, "self_supervised", str(step)]
        done = subprocess.run(words, cwd=again, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert_same_end(whole, again, "self_supervised", bits=True)
