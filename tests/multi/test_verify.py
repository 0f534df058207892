"""`lockstep verify` tells equal runs from others."""

import math
from pathlib import Path

import pytest
import tiny
import torch

from lockstep.commands.verify import draws_equal, weight_difference
from multi.test_launch import run

SHARED = """
import torch
from tiny import Tiny

class Shared(Tiny):
    name = "shared"
    def loss(self, model, batch, rng):
        batch = {**batch, "x": batch["x"] + 0.01 * torch.randn_like(batch["x"])}  # noise of the rank's own generator
        return super().loss(model, batch, rng)
"""


@pytest.mark.slow
def test_a_recipe_that_keeps_to_the_rules_is_equal_on_worlds_that_divide_nothing(tmp_path: Path) -> None:
    flags = ["--worlds", "1,3", "--steps", "50", "--global_batch_size", "64"]
    done = run(["lockstep", "verify", f"{tiny.__file__}:Terms", *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 2 and "DIFFERENT" not in done.stdout


@pytest.mark.slow
def test_randomness_of_a_ranks_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    done = run(["lockstep", "verify", "shared.py:Shared", "--worlds", "1,2", "--steps", "5"], tmp_path)
    assert done.returncode == 1
    assert "DIFFERENT" in done.stdout and "randn_like at shared.py:8: these random numbers are not keyed" in done.stdout


@pytest.mark.slow
def test_dropout_is_compared_as_it_is_trained(tmp_path: Path) -> None:
    flags = ["--worlds", "1,3", "--steps", "8", "--global_batch_size", "8"]
    done = run(["lockstep", "verify", f"{tiny.__file__}:WithDropout", *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 1 and "dropout is on: every micro-batch has one sample" in done.stdout


@pytest.mark.slow
def test_dit_is_equal_on_one_rank_and_on_two(tmp_path: Path) -> None:
    done = run(["lockstep", "verify", "dit", "--worlds", "1,2", "--steps", "4"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_not_a_number_is_not_equal() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert weight_difference({"a": one, "b": one}, {"a": one, "b": nan}) == math.inf
    assert weight_difference({"a": one}, {"b": one}) == math.inf
    assert weight_difference({"a": one}, {"a": one}) == 0
    assert not draws_equal([{"uniform x": 1}], [{"uniform x": 2}])
    assert not draws_equal([{"uniform x": 1}], [{}])
    assert draws_equal([{"normal x": 1.0}], [{"normal x": 1.0 + 1e-12}])


RANKED = """
import os
from tiny import Tiny

class Ranked(Tiny):
    name = "ranked"
    def loss(self, model, batch, rng):
        loss = super().loss(model, batch, rng)
        loss.total = loss.total * (1 + 1e-6 * int(os.environ.get("RANK", 0)))  # less than float32 sums are off by
        return loss
"""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "precision"), [("dit", "bf16"), ("jit", "fp32"), ("scribble", "fp32"),
                                                  ("protein", "bf16"), ("vision", "bf16")])  # fmt: skip
def test_exact_runs_of_a_recipe_have_the_same_bits(tmp_path: Path, recipe: str, precision: str) -> None:
    flags = ["--bits", "--worlds", "1,3", "--steps", "2", "--precision", precision]
    done = run(["lockstep", "verify", recipe, *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 1


@pytest.mark.slow
def test_bits_find_what_rounding_would_hide(tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(RANKED)
    done = run(["lockstep", "verify", "ranked.py:Ranked", "--bits", "--worlds", "1,2", "--steps", "3"], tmp_path)
    assert done.returncode == 1 and "DIFFERENT" in done.stdout, done.stdout + done.stderr


def test_bits_are_not_compared_in_float64(tmp_path: Path) -> None:
    done = run(["lockstep", "verify", "dit", "--bits", "--precision", "fp64"], tmp_path)
    assert done.returncode == 2 and "fp32, bf16 or fp16, not fp64" in done.stderr
