"""The recipe `jit` as users run it: golden losses, and the laptop's run, shortened, with samples that are judged."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lockstep.commands.trained import open_run
from lockstep.distributed import World
from lockstep.options import UseFlags
from lockstep.recipes.shapes import Shapes
from recipes.golden import fit, golden, logged
from recipes.test_dit_learns import batch, classifier


def ten_steps(folder: Path) -> list[float]:
    flags = ["--model", "JiT-Nano/8", "--img_size", "32", "--class_tokens", "4", "--batch_size", "8", "--n_steps", "10"]
    flags += ["--lr", "1e-3", "--warmup_epochs", "0", "--log_every", "1", "--sample_per_class", "1"]
    fit("jit", folder, *flags, "--sample_steps", "2", "--sample_cfg", "2.0")
    return logged(folder)


@pytest.mark.slow
def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    assert ten_steps(tmp_path / "run") == pytest.approx(golden("jit"), rel=1e-5)
    exported = {p.name for p in (tmp_path / "run").glob("*.safetensors")}
    assert exported == {"model.safetensors", "model_ema.safetensors", "model_ema-0.9996.safetensors"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptops_run_learns_and_its_samples_are_what_they_should_be(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--n_steps", "280", "--eval_every", "0", "--save_every", "0", "--sample_per_class", "1"]
    fit("jit", out, "--preset", "laptop", *flags)
    curve = logged(out)
    assert curve[-1] < curve[0] / 4, (curve[0], curve[-1])  # the first logged value is that of step 10
    run = open_run(out, UseFlags(weights="ema", seed=1), World(), nullcontext())
    side = run.recipe.options.img_size
    network = classifier(side)
    with torch.no_grad():
        images, labels = batch(Shapes("test", 1000, side), range(500))
        assert (network(images).argmax(1) == labels).double().mean() > 0.95  # it can judge
        samples = run.evaluator.generate(100, {"cfg": 2.0})
        assert samples is not None
        told = network(samples[:, -1]).argmax(1) == torch.arange(100) % 10
    assert told.double().mean() > 0.4, told.double().mean()  # it was 0.62; chance is 0.1
