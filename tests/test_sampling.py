"""Samples and scores made during training: when, with what progress, and once only."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engine import lines, trainer, trainer_for
from torch import Tensor, nn

from lockstep import Rng
from lockstep.activity import SAMPLING
from lockstep.distributed import World
from lockstep.evaluate import eval_mode
from lockstep.flags import parse

FLAGS = ["--n_steps", "8", "--save_every", "4", "--log_every", "4", "--ema_decay", "0.9"]
SETS = ["few-ema", "few-plain", "many-ema", "many-plain"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "samples").iterdir()) if (folder / "samples").exists() else []


def test_samples_are_written_when_due_and_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = trainer(World(), "Generating", [*FLAGS, "--sample_every", "5", "--out", str(tmp_path)]).fit()
    expected = [f"step-{step:08d}-{name}{end}" for step in (5, 8) for name in SETS for end in (".more", ".txt")]
    scores = [f"step-{step:08d}-score.json" for step in (4, 8)]
    assert names(tmp_path) == sorted(expected + scores)
    assert outcome.files[-1].name == "step-00000008-many-plain.more" and len(outcome.files) == 8
    shown = capsys.readouterr().out
    assert "step 5: samples few-ema (1 of 4)" in shown
    assert [line["step"] for line in lines(tmp_path) if "quality" in line] == [4, 8]
    assert "a note of the score" in (tmp_path / "log.txt").read_text()


def test_sample_every_0_writes_none_also_not_at_the_end(tmp_path: Path) -> None:
    outcome = trainer(World(), "Generating", [*FLAGS, "--sample_every", "0", "--out", str(tmp_path)]).fit()
    assert outcome.files == () and not [name for name in names(tmp_path) if "score" not in name]


def test_what_a_killed_run_has_made_is_not_made_again(tmp_path: Path) -> None:
    flags = [*FLAGS, "--sample_every", "4", "--out", str(tmp_path)]
    run = trainer(World(), "Generating", flags)

    def killed(*_: object) -> list[Path]:
        if any(name.startswith("step-00000008-few-plain") for name in names(tmp_path)):
            raise KeyboardInterrupt
        return save(*_)

    save = run.recipe.save_samples
    run.recipe.save_samples = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "samples").iterdir() if path.is_file()}
    assert len([path for path in before if "00000008" in path.name]) == 4

    again = trainer(World(), "Generating", ["--resume", str(tmp_path)])
    again.fit()
    # Two sets were left, in two calls of sample(), and one score.
    assert again.recipe.calls == 3
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert len([name for name in names(tmp_path) if "00000008" in name]) == 9


def test_a_run_killed_in_the_middle_of_samples_makes_the_rest_when_it_is_resumed(tmp_path: Path) -> None:
    flags = [*FLAGS, "--sample_every", "4", "--out", str(tmp_path)]
    run = trainer(World(), "Generating", flags)

    def killed(*_: object) -> list[Path]:
        raise KeyboardInterrupt

    run.recipe.save_samples = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert not [name for name in names(tmp_path) if name.startswith("step-")]
    trainer(World(), "Generating", ["--resume", str(tmp_path)]).fit()
    assert len([name for name in names(tmp_path) if "00000004" in name]) == 9


def test_an_exception_in_an_evaluation_leaves_the_model_training_and_the_clock_right(tmp_path: Path) -> None:
    run = trainer(World(), "Plain", ["--out", str(tmp_path)])
    run.model.train()
    with pytest.raises(RuntimeError), eval_mode(run.model):
        assert not run.model.training
        raise RuntimeError
    assert run.model.training
    run._logged_at = 0.0
    with pytest.raises(RuntimeError), run._between_steps(SAMPLING):
        torch.zeros(1)
        raise RuntimeError
    assert run._logged_at > 0.0


def test_averaged_weights_are_put_back_after_an_exception(tmp_path: Path) -> None:
    run = trainer(World(), "Plain", ["--ema_decay", "0.9", "--out", str(tmp_path)])
    run.train_step()
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(RuntimeError), run.state.emas[0].applied():
        raise RuntimeError
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug in the writer")])
def test_samples_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, error: Exception) -> None:
    run = trainer(World(), "Generating", [*FLAGS, "--sample_every", "4", "--out", str(tmp_path)])

    def fail(samples: Tensor, stem: Path) -> list[Path]:
        if run.progress.step == failing:
            stem.with_suffix(".txt").write_text("the first")
            raise error
        return save(samples, stem)

    failing, save = 4, run.recipe.save_samples
    run.recipe.save_samples = fail  # type: ignore[method-assign]
    assert run.fit().step == 8
    said = (tmp_path / "log.txt").read_text()
    assert said.count("could not be written") == 4 and str(error) in said
    assert [line["failed_outputs"] for line in lines(tmp_path) if "failed_outputs" in line] == [0, 4]
    assert len([name for name in names(tmp_path) if "00000008" in name]) == 9

    failing, run = 8, trainer(World(), "Generating", [*FLAGS, "--sample_every", "8", "--out", str(tmp_path / "last")])
    run.recipe.save_samples = fail  # type: ignore[method-assign]
    assert run.fit().step == 8 and not (tmp_path / "last" / "samples" / ".unfinished").exists()


def test_a_score_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    run = trainer(World(), "Generating", [*FLAGS, "--out", str(tmp_path)])

    def fail(model, sum_over_ranks, folder):  # type: ignore[no-untyped-def]
        return sum_over_ranks(4, 2, lambda numbers, rng: model(torch.zeros(1)))

    run.recipe.score = fail  # type: ignore[method-assign]
    assert run.fit().step == 8
    assert (tmp_path / "log.txt").read_text().count("the score failed: rank 0: RuntimeError") == 2


def test_what_lies_after_the_checkpoint_is_made_and_logged_again(tmp_path: Path) -> None:
    """Killed at step 7, resumed from the checkpoint of step 3 with another rate: samples and score of 4 are others."""
    flags = [*FLAGS[:2], "--save_every", "3", "--log_every", "1", "--sample_every", "4", "--out", str(tmp_path)]
    run = trainer(World(), "Generating", flags)
    step = run.train_step

    def killed() -> None:
        if run.progress.step == 5:
            raise KeyboardInterrupt
        step()

    run.train_step = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    before = (tmp_path / "samples/step-00000004-few-plain.txt").read_text()
    assert [line["step"] for line in lines(tmp_path) if "quality" in line] == [4]
    trainer(World(), "Generating", ["--resume", str(tmp_path), "--lr", "0.5"]).fit()
    assert (tmp_path / "samples/step-00000004-few-plain.txt").read_text() != before
    assert [line["step"] for line in lines(tmp_path) if "quality" in line] == [4, 8]


class Tokens(tiny.Generating):
    """Samples are token numbers, of which float32 holds only some."""

    name = "tokens"

    def sample(self, model: nn.Module, index: Tensor, rng: Rng, **settings: Any) -> Tensor:
        return 2**24 + 1 + index

    def save_samples(self, samples: Tensor, path: Path) -> Any:
        (path.parent / "parts").mkdir(exist_ok=True)
        (path.parent / "parts" / f"{path.name}.txt").write_text(str(samples.tolist()))
        (path.parents[2] / "elsewhere.bin").write_bytes(b"")
        return [str(path.parent / "parts" / f"{path.name}.txt"), path.parents[2] / "elsewhere.bin"]


def test_samples_may_be_integers_and_any_files_anywhere(tmp_path: Path) -> None:
    flags = [
        "--n_steps",
        "4",
        "--sample_every",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        "--tensorboard",
    ]
    outcome = trainer_for(parse(Tokens, flags, "test"), World()).fit()
    text, other, *_ = outcome.files
    assert text == tmp_path / "run/samples/parts/step-00000004-few-plain.txt"
    assert text.read_text() == "[16777217, 16777218, 16777219]"
    assert other == tmp_path / "run/elsewhere.bin"
    assert "is off" not in (log := (tmp_path / "run/log.txt").read_text()) and "could not be written" not in log


@pytest.mark.parametrize("method", ["sample", "save_samples"])
def test_samples_interrupted_by_the_end_of_a_loader_worker_are_made_again(tmp_path: Path, method: str) -> None:
    """Torch raises it wherever the process is."""
    run = trainer(World(), "Generating", [*FLAGS, "--sample_every", "8", "--out", str(tmp_path)])
    made, died = getattr(run.recipe, method), list[int]()

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        if not died:
            died.append(1)
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Hangup. ")
        return made(*arguments, **settings)

    setattr(run.recipe, method, interrupted)
    outcome = run.fit()
    assert died and len(outcome.files) == 8 and run.sampler.failures == 0
