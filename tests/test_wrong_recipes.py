"""What is wrong with a recipe, or does not fit it, is said before work is lost, and in a form to copy."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engine import trainer_for
from torch import Tensor, nn

from lockstep import Evaluates, Loss, Recipe, Rng, Trainer
from lockstep.distributed import World
from lockstep.flags import parse


class Measured(tiny.Plain, Evaluates):
    """Metrics of its own: one always, one only of sets with more than five samples."""

    name = "measured"

    def evaluate_batch(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> dict[str, Any]:
        return {"samples": len(batch["x"])}

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        samples = float(sums["samples"])
        return {"samples": samples} | ({"spread": 1.0} if samples > 5 else {})


class MeasuredLater(Measured):
    """Whose metrics have another name once training has begun."""

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {"late" if self.calls else "early": 1.0}


def build(recipe: type[Recipe], folder: Path, *flags: str) -> Trainer:
    words = ["--device", "cpu", "--n_steps", "4", "--out", str(folder), *flags]
    return trainer_for(parse(recipe, words, "test"), World())


def test_an_unknown_best_metric_is_found_before_the_first_step(tmp_path: Path) -> None:
    for recipe, known in ((tiny.Plain, "loss"), (Measured, "samples, spread")):
        folder = tmp_path / recipe.__name__
        with pytest.raises(ValueError, match=f"best_metric is one of {known}, not sprad"):
            build(recipe, folder, "--eval_every", "2", "--best_metric", "sprad").fit()
        assert not (folder / "receipt.json").exists(), "the folder can be used again"


def test_a_default_best_metric_that_the_recipe_does_not_have_is_found_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best_metric is one of samples, spread, not loss"):
        build(Measured, tmp_path / "run", "--eval_every", "2").fit()


def test_a_best_metric_that_only_the_whole_set_has_is_accepted(tmp_path: Path) -> None:
    run = build(Measured, tmp_path / "run", "--eval_every", "2", "--best_metric", "spread")
    assert run.fit().metrics == {"samples": 101.0, "spread": 1.0}


def test_without_evaluations_during_training_the_best_metric_does_not_matter(tmp_path: Path) -> None:
    assert build(Measured, tmp_path / "run").fit().step == 4


def test_a_best_metric_that_disappears_ends_the_run_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(MeasuredLater, tmp_path / "run", "--eval_every", "2", "--best_metric", "early")
    recipe: Any = run.recipe
    monkeypatch.setattr(run, "train_step", lambda step=run.train_step: (setattr(recipe, "calls", 1), step()))
    with pytest.raises(ValueError, match="best_metric is one of late, not early"):
        run.fit()
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").is_file()


class TensorLoss(tiny.Plain):
    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Any:
        return (model(batch["x"]) - batch["y"]).square().mean()


class LossOfRows(tiny.Plain):
    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Any:
        error = (model(batch["x"]) - batch["y"]).square()
        return Loss(error.sum(1), error.numel())


@pytest.mark.parametrize("recipe", [TensorLoss, LossOfRows])
def test_a_loss_in_another_form_is_an_error_that_shows_the_right_one(recipe: type[Recipe], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"return Loss\(error\.sum\(\), error\.numel\(\)\)") as wrong:
        build(recipe, tmp_path / "run").fit()
    assert ("returned a Tensor" if recipe is TensorLoss else "not (8,)") in str(wrong.value)


class OptimizerList(tiny.Plain):
    returned: list[Any] = []

    def optimizer(self, model: nn.Module) -> Any:
        return self.returned


def test_several_optimizers_are_an_error_that_shows_groups_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for returned in ([torch.optim.SGD([nn.Parameter(torch.zeros(1))])], []):
        monkeypatch.setattr(OptimizerList, "returned", returned)
        with pytest.raises(ValueError, match=r'optimizer\(\) returned a list, .*AdamW\(\[\{"params"'):
            build(OptimizerList, tmp_path / "run")
