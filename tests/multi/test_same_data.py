"""Ranks that do not see the same data are found before step 1, or soon after it; random data are called random."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine import lines, trainer_for
from PIL import Image
from torch import Tensor

from lockstep.commands.trained import TrainedRun
from lockstep.distributed import World
from lockstep.evaluate import Evaluator
from lockstep.flags import parse
from lockstep.registry import register
from lockstep.watch import OutOfLockstep
from lockstep.watch import data as watch_data
from lockstep.watch.data import DataWatch, Samples, digest


class Points(tiny.Points):
    """Points of which one rank has others."""

    def __init__(self, size: int, change: str = ""):
        super().__init__(size)
        self.change, self.reads = change, list[int]()

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        self.reads.append(i)
        item = super().__getitem__(i)
        if self.change == "content" or (self.change == "late" and len(self.reads) > 60):
            return {**item, "x": item["x"] + 1e-6}
        if self.change == "error":
            raise OSError("No such file: x.png")
        if self.change == "random" or (self.change == "coin" and torch.rand(()) < 0.5):
            return {**item, "x": item["x"] + torch.rand(6) + random.random() + np.random.random()}
        return item


class Differing(tiny.Plain):
    """`wrong`: the split that rank `bad_rank` (-1: every rank) has otherwise, and how."""

    name = "differing"
    rank, bad_rank, wrong = 0, 1, ("train", "")

    def dataset(self, split: str) -> Any:
        size, change = {"train": 997, "val": 101}[split], ""
        if split == self.wrong[0] and self.bad_rank in (self.rank, -1):
            change = self.wrong[1]
        if change == "none":
            return None
        return Points(size - 1, "") if change == "length" else Points(size, change)


def attempt(world: World, out: str, bad_rank: int, wrong: tuple[str, str], share: float = 0.0) -> tuple[str, int]:
    """Train on data that differ; the error and the steps until then."""
    Differing.rank, Differing.bad_rank, Differing.wrong = world.rank, bad_rank, wrong
    before, watch_data.SHARE = watch_data.SHARE, share
    found = register(Differing, "differing", f"{__file__}:Differing")
    flags = ["--device", "cpu", "--n_steps", "60", "--global_batch_size", "12", "--log_every", "2", "--out", out]
    run = None
    try:
        run = trainer_for(parse(found, flags, "test"), world)
        run.fit()
    except OutOfLockstep as error:
        return str(error), run.progress.step if run else 0
    finally:
        watch_data.SHARE = before
    return "", run.progress.step


CASES = {
    ("train", "length"): ("train has 997 samples on rank 0 but 996 samples on rank 1", "996 samples on rank 1 but 997"),
    ("val", "length"): ("val has 101 samples on rank 0 but 100 samples on rank 1", "val has 100 samples on rank 1"),
    ("val", "none"): ("val has 101 samples on rank 0 but no samples on rank 1", "val has no samples on rank 1 but 101"),
    ("train", "content"): ("of train is not the same on rank 0 and rank 1;", "train is not the same on rank 1 as on"),
    ("val", "content"): ("of val is not the same on rank 0 and rank 1;", "val is not the same on rank 1 as on the"),
    ("val", "error"): ("of val cannot be read on rank 1, only on others (OSError: No", "val cannot be read on rank 1"),
}


@pytest.mark.parametrize("wrong", CASES, ids=" ".join)
def test_differing_data_are_found_before_step_1(ranks, tmp_path: Path, wrong: tuple[str, str]) -> None:
    for size, expected in zip((2, 3), CASES[wrong], strict=True):
        results = ranks(size)(attempt, str(tmp_path / str(size)), 1, wrong)
        assert len(set(results)) == 1
        message, step = results[0]
        assert expected in message and "every rank needs the same samples" in message and step == 0


def test_data_that_change_later_are_found_while_the_run_trains(ranks, tmp_path: Path) -> None:
    results = ranks(2)(attempt, str(tmp_path / "run"), 1, ("train", "late"), 1.0)
    assert len(set(results)) == 1
    message, step = results[0]
    assert "of train is not the same on rank 0 and rank 1;" in message and 0 < step < 60


@pytest.mark.parametrize("change", ["random", "coin"])
def test_random_data_are_called_random_and_the_run_goes_on(ranks, tmp_path: Path, change: str) -> None:
    assert ranks(2)(attempt, str(tmp_path / "run"), -1, ("train", change), 1.0) == [("", 60)] * 2
    said = (tmp_path / "run" / "log.txt").read_text()
    assert said.count("samples of train are random by nature") == 1 and "samples of val are random" not in said


def test_equal_data_are_compared_now_and_then_and_change_nothing(ranks, tmp_path: Path) -> None:
    for name, share in (("without", 0.0), ("with", 1.0)):
        assert ranks(2)(attempt, str(tmp_path / name), 1, ("train", ""), share) == [("", 60)] * 2
    losses = [[x["loss"] for x in lines(tmp_path / name) if "loss" in x] for name in ("without", "with")]
    assert losses[0] == losses[1]


class Clock:
    """Time that passes only when a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def slow_checks(world: World) -> list[int]:
    """How often samples are read that take 0.1 s each: before step 1, in the next 100 s, in 400 s after that."""
    clock, counts, reads = Clock(), list[int](), list[int]()

    def items(indices: list[int]) -> list[Tensor]:
        reads.extend(indices)
        clock.now += 0.1
        return [torch.ones(3)]

    plain, watch_data.time = watch_data.time, clock  # type: ignore[attr-defined]
    try:
        watch = DataWatch(world, {"train": Samples(1000, items)}, 0)
        watch.compare_splits()
        counts.append(len(reads))
        for seconds in (100, 400):
            for step in range(seconds):
                clock.now += 1
                if places := world.broadcast(watch.choose(step)):
                    watch.compare(places)
            counts.append(len(reads) - sum(counts))
    finally:
        watch_data.time = plain  # type: ignore[attr-defined]
    return counts


def test_slow_samples_are_read_seldom(ranks) -> None:
    """Before step 1 for a quarter of a second and the first once more; later for a thousandth of the time."""
    for at_start, soon, later in ranks(2)(slow_checks):
        assert 2 <= at_start <= 4 and soon == 0 and 2 <= later <= 4


def predicted(world: World, folder: Path) -> str:
    """The error of a command whose ranks find other files."""
    evaluator = Evaluator(tiny.Plain(), torch.nn.Linear(1, 1), world, nullcontext(), 0)
    run = TrainedRun(folder, tiny.Plain(), evaluator, 0, "plain")
    try:
        run.compare_ranks("predict", Points(5 + world.rank))
    except OutOfLockstep as error:
        return str(error)
    return ""


def test_commands_that_use_a_trained_run_compare_their_data(ranks, tmp_path: Path) -> None:
    for message in ranks(2)(predicted, tmp_path):
        assert "predict has 5 samples on rank 0 but 6 samples on rank 1" in message


@dataclass
class Pair:
    a: Tensor
    b: str


def test_a_digest_covers_all_that_a_sample_is_made_of() -> None:
    picture = Image.new("RGB", (2, 2))
    samples = [
        torch.arange(4), torch.arange(4.0), torch.arange(4).view(2, 2), torch.tensor([]), torch.tensor(1),
        torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), torch.ones(2).to_sparse(),
        np.arange(4), np.array(["a", None], dtype=object), np.float32(1), picture, 1, 1.0, True, None, "a", b"a",
        {"a": 1}, {"a": 1, "b": 2}, [1, 2], [[1], 2], (1, (2, 3)), Pair(torch.ones(2), "x"), Pair(torch.ones(2), "y"),
    ]  # fmt: skip
    assert len({digest(sample) for sample in samples}) == len(samples)
    assert digest({"a": 1, "b": torch.ones(2)}) == digest({"b": torch.ones(2), "a": 1})
    assert digest(torch.ones(3, 4).t()) == digest(torch.ones(3, 4).t().contiguous())
    assert digest("/node1/data/x.png") == digest("/node2/data/x.png") != digest("/node1/data/y.png")
    assert digest(object()) == digest(object())
