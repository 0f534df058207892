"""Data that are not finite: said by sample, and never taken for a trained model."""

import os
import signal
from pathlib import Path

import pytest
import tiny
import torch
from engine import trainer
from torch import Tensor

import lockstep
from lockstep.distributed import World
from lockstep.outcome import Diverged

FLAGS = {"device": "cpu", "log_every": 4, "size": 64, "batch_size": 8}


class Points(tiny.Points):
    """Some of the points have an input that is not a number."""

    def __init__(self, size: int, bad: set[int]):
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = super().__getitem__(i)
        return {**item, "x": torch.full_like(item["x"], float("nan"))} if i in self.bad else item


class OneBad(tiny.Plain):
    """One sample of 64: one step in eight has it."""

    name = "one-bad"
    bad = {13}

    def dataset(self, split: str) -> Points:
        return Points(self.options.size, self.bad if split == "train" else set())


class ManyBad(OneBad):
    name = "many-bad"
    bad = set(range(0, 64, 7))


def test_a_skipped_step_is_said_with_the_sample_to_blame(tmp_path: Path) -> None:
    outcome = lockstep.fit(OneBad, n_steps=16, out=str(tmp_path / "run"), **FLAGS)
    said = (tmp_path / "run/log.txt").read_text()
    assert outcome.step == 16 and (tmp_path / "run/model.pth").exists()
    assert said.count("steps skipped so far") == 2  # once in each epoch of eight steps
    assert said.count("samples with a loss that is not finite by themselves: 13\n") == 1


def test_too_many_skipped_steps_fail_the_run_and_export_nothing(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"in \d+ of \d+ steps, more than --max_bad_share 0.1 allows"):
        lockstep.fit(ManyBad, n_steps=100, out=str(tmp_path / "run"), **FLAGS)
    assert not (tmp_path / "run/model.pth").exists()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_run_that_skipped_all_of_its_steps_has_trained_nothing(tmp_path: Path) -> None:
    class AllBad(OneBad):
        bad = set(range(64))

    with pytest.raises(Diverged, match="in 3 of 3 steps"):
        lockstep.fit(AllBad, n_steps=3, max_bad_share=1.0, out=str(tmp_path / "run"), **FLAGS)
    assert not list((tmp_path / "run").glob("model*"))


def test_the_share_can_be_allowed(tmp_path: Path) -> None:
    outcome = lockstep.fit(ManyBad, n_steps=16, max_bad_share=1.0, out=str(tmp_path / "run"), **FLAGS)
    assert outcome.step == 16


def test_bad_steps_in_a_row_stop_the_run_though_good_ones_follow_before_the_next_log(tmp_path: Path) -> None:
    options = {"poison_from": 5, "poison_to": 8, "max_bad_steps": 3, "max_bad_share": 1.0}
    with pytest.raises(Diverged, match=r"in 3 steps in a row \(up to step 12\)"):
        lockstep.fit(tiny.Tiny, n_steps=12, out=str(tmp_path / "run"), **{**FLAGS, "log_every": 12}, **options)


def test_a_bad_step_is_said_also_if_the_run_is_stopped_before_its_next_log(tmp_path: Path) -> None:
    flags = ["--n_steps", "20", "--log_every", "10", "--poison_from", "2", "--poison_to", "3", "--out", str(tmp_path)]
    run = trainer(World(), "Tiny", flags)
    step = run.train_step

    def stopped_at_5() -> None:
        if run.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        step()

    run.train_step = stopped_at_5  # type: ignore[method-assign]
    assert run.fit().stopped_by == "SIGTERM"
    assert "the gradient was not finite at step 3: 1 of 5 steps skipped so far" in (tmp_path / "log.txt").read_text()


class Unlabelled(tiny.Plain):
    """One sample in eight has a label: some global batches have none."""

    name = "unlabelled"

    def loss(self, model: torch.nn.Module, batch: dict[str, Tensor], rng: lockstep.Rng) -> lockstep.Loss:
        labelled = (batch["x"][:, 0] > 1.15).to(batch["x"].dtype)
        error = (model(batch["x"]) - batch["y"]).square().mean(1)
        return lockstep.Loss((labelled * error).sum(), labelled.sum())


@pytest.mark.parametrize("exact", [False, True])
def test_a_batch_without_any_label_is_a_sum_of_nothing(tmp_path: Path, exact: bool) -> None:
    settings = FLAGS | {"batch_size": 1, "global_batch_size": 2, "exact": exact}
    outcome = lockstep.fit(Unlabelled, n_steps=30, out=str(tmp_path / "run"), **settings)
    labelled = sum(Unlabelled().dataset("train")[i]["x"][0] > 1.15 for i in range(64))
    assert 0 < labelled < 20
    assert outcome.step == 30 and "not finite" not in (tmp_path / "run/log.txt").read_text()
