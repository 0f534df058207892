"""`lockstep bench scaling`: one rank and several in the same processes."""

import json
from pathlib import Path

import pytest

from multi.test_launch import run


@pytest.mark.slow
def test_scaling_prints_and_writes_what_ranks_gain(tmp_path: Path) -> None:
    words = ["--recipes", "vision", "--steps", "1", "--rounds", "1", "--batch_size", "2", "--json", "found.json"]
    done = run(["lockstep", "bench", "scaling", *words], tmp_path, LOCKSTEP_SMOKE="2")
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("vision")]
    found = json.loads((tmp_path / "found.json").read_text())["recipes"]["vision"]
    assert row[-1] == f"{found['ratio_by_processor_time']:.2f}" and found["ratio"] > 0
    assert all(found[kind]["samples_per_second"] > 0 for kind in ("alone", "together"))


def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = run(["lockstep", "bench", "scaling", "--recipes", "dot"], tmp_path)
    assert done.returncode == 2 and "'dot'" in done.stderr
    assert "lockstep bench gpu, loader or scaling" in run(["lockstep", "bench"], tmp_path).stderr
