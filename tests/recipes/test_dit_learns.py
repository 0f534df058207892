"""The recipe as users run it: golden losses, and the job of `make train` from start to samples."""

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, environment
from torch import Tensor, nn

from lockstep.commands.trained import open_run
from lockstep.distributed import World
from lockstep.options import UseFlags
from lockstep.recipes.shapes import Shapes
from recipes.golden import fit, golden, logged


@pytest.mark.slow
def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    assert ten_steps(tmp_path / "run") == pytest.approx(golden("dit"), rel=1e-5)


def ten_steps(folder: Path) -> list[float]:
    flags = ["--model", "DiT-Nano/4", "--batch_size", "8", "--num_register_tokens", "2", "--n_steps", "10"]
    flags += ["--log_every", "1", "--lr", "1e-3", "--sample_per_class", "1", "--sample_steps", "2"]
    fit("dit", folder, *flags)
    return logged(folder)


def classifier(side: int) -> nn.Module:
    """A small network that has learnt to name the embedded shapes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 16), (16, 32), (32, 64)]:
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    data = Shapes("train", 50_000, side)
    for step in range(150):
        images, labels = batch(data, range(64 * step, 64 * (step + 1)))
        F.cross_entropy(network(images + 0.1 * torch.randn_like(images)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.eval()


def batch(data: Shapes, numbers: range) -> tuple[Tensor, Tensor]:
    items = data.__getitems__(list(numbers))
    return torch.stack([x["image"] for x in items]) / 255, torch.stack([x["label"] for x in items])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_job_of_make_train_learns_and_its_samples_are_what_they_should_be(tmp_path: Path) -> None:
    """A quarter of its steps, on smaller images: 45 of 100 samples are told to be what they should be; chance is 10.

    LOCKSTEP_WHOLE=1 takes all steps and pixels, after which it is 93, and asks for more.
    """
    import subprocess

    recipe = re.search(r"lockstep (train dit --preset laptop) --nproc", (ROOT / "Makefile").read_text())
    assert recipe is not None
    out = tmp_path / "run"
    whole = os.environ.get("LOCKSTEP_WHOLE") == "1"
    command = ["lockstep", *recipe.group(1).split(), "--nproc", "2", "--out", str(out)]
    command += [] if whole else ["--img_size", "16", "--n_steps", "320", "--sample_per_class", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("model.pth", "model.safetensors"):
        assert str(out / name) in done.stdout and (out / name).exists()
    curve = logged(out)
    assert curve[-1] < curve[0] / 2, (curve[0], curve[-1])  # the first logged value is that of step 10
    grid = next(line for line in done.stdout.splitlines() if line.endswith("-ema.png"))
    assert Path(grid).exists()

    side = int(re.search(r"^img_size: (\d+)", (out / "config.yaml").read_text(), re.M).group(1))  # type: ignore[union-attr]
    network = classifier(side)
    with torch.no_grad():
        images, labels = batch(Shapes("test", 1000, side), range(500))
        assert (network(images).argmax(1) == labels).double().mean() > 0.95  # it can judge
        run = open_run(out, UseFlags(weights="ema", seed=1), World(), nullcontext())
        samples = run.evaluator.generate(100, {"cfg": 2.5})
        assert samples is not None
        told = network(samples[:, -1]).argmax(1) == torch.arange(100) % 10
    assert told.double().mean() > (0.8 if whole else 0.2), told.double().mean()
