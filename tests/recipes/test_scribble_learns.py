"""The recipe `scribble` as users run it: golden losses, and the preset laptop from start to labels in a file."""

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import environment

from lockstep.recipes.scribble.files import write_image
from lockstep.recipes.scribble.scenes import Scenes
from recipes.golden import fit, golden, logged


@pytest.mark.slow
def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    assert ten_steps(tmp_path / "run") == pytest.approx(golden("scribble"), rel=1e-5)


def ten_steps(folder: Path) -> list[float]:
    flags = ["--layers", "18", "--crop_size", "32", "--batch_size", "4", "--n_steps", "10", "--lr", "0.1"]
    flags += ["--precision", "fp64", "--log_every", "1", "--save_every", "0", "--eval_every", "0"]
    fit("scribble", folder, *flags, "--warmup_epochs", "0")
    return logged(folder)


def lockstep(*words: str) -> str:
    done = subprocess.run(["lockstep", *words], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptop_preset_learns_and_labels_a_file(tmp_path: Path) -> None:
    """A fifth of its steps, so that it is over soon; chance is a mIoU of about 0.1 (all of it background)."""
    out = tmp_path / "run"
    flags = ["--n_steps", "30", "--warmup_steps", "8", "--nproc", "2", "--out", str(out)]
    lockstep("train", "scribble", "--preset", "laptop", *flags)
    (miou,) = logged(out, "val/miou")
    assert miou > 0.4, miou

    Path(tmp_path / "in").mkdir()
    scenes = Scenes("test", 80)
    for i in range(6):
        write_image(scenes[i]["image"], tmp_path / "in" / f"{i}.png")
    said = lockstep("predict", str(out), str(tmp_path / "in"), "--out", str(tmp_path / "one"))
    assert said.startswith("6 images; share of pixels: ") and str(tmp_path / "one" / "0.png") in said
    lockstep("predict", str(out), str(tmp_path / "in"), "--out", str(tmp_path / "two"), "--nproc", "2")
    right = 0.0
    for i in range(6):
        labels, other = (np.array(Image.open(tmp_path / name / f"{i}.png")) for name in ("one", "two"))
        assert np.array_equal(labels, other)
        right += float((labels == scenes[i]["label"].numpy()).mean()) / 6
    assert right > 0.65, right

    lockstep("test", str(out), "--out", str(tmp_path / "test"))
    rows = list(csv.DictReader((tmp_path / "test" / "iou.csv").open()))
    tested = json.loads((tmp_path / "test" / "metrics.json").read_text())
    assert tested["miou"] > 0.4 and len(rows) == 21 and (tmp_path / "test" / "iou.png").exists()
    assert sum(int(row["pixels"]) for row in rows) == len(scenes) * 80 * 60
