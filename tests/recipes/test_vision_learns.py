"""The recipe as users run it: golden losses, presets that learn, the example's three tasks, the real Fashion-MNIST."""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest
from processes import ROOT, environment

from lockstep.commands import test
from recipes.golden import fit, golden, logged

FASHION = Path("/usr/share/datasets/fashion-mnist")
RUNS = {
    "resnet18": ["--model", "resnet18", "--label_smoothing", "0.1"],
    "vit_s": ["--model", "vit_s"],
    "unet": ["--model", "unet"],
}


def ten_steps(folder: Path) -> dict[str, list[float]]:
    common = ["--width", "4", "--img_size", "16", "--max_samples", "100", "--batch_size", "8", "--n_steps", "10"]
    for name, flags in RUNS.items():
        fit("vision", folder / name, *flags, *common, "--log_every", "1")
    return {name: logged(folder / name) for name in RUNS}


@pytest.mark.slow
def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    expected, now = golden("vision"), ten_steps(tmp_path)
    assert now.keys() == expected.keys()
    for name in expected:
        assert len(now[name]) == 10 and now[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
def test_the_laptop_preset_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit("vision", tmp_path / "run", "--preset", "laptop", "--n_steps", "120", "--eval_every", "60")
    assert logged(tmp_path / "run", "val/accuracy")[-1] > 0.9  # chance is 0.1
    assert test.run([str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "run/test/metrics.json").read_text())["accuracy"] > 0.9
    assert "per_class_f1.png" in capsys.readouterr().out


@pytest.mark.slow
def test_the_laptop_preset_of_masks_learns(tmp_path: Path) -> None:
    fit("vision", tmp_path / "run", "--preset", "laptop_seg", "--n_steps", "220", "--eval_every", "220")
    assert logged(tmp_path / "run", "val/miou")[-1] > 0.17  # it was 0.23; all background: 0.07
    assert logged(tmp_path / "run", "val/dice")[-1] > 0.17  # it was 0.24; all background: 0.08


def example(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As the guide prints it, from the example's folder; runs go to `folder`."""
    for name in ("main.py", "configs", "images"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / "examples/vision" / name)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(LOCKSTEP_SMOKE="2"), capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_example_trains_tests_and_predicts_on_two_ranks(tmp_path: Path) -> None:
    start = "torchrun --standalone --nproc_per_node=2 main.py --config configs/ddp_example.yaml --width 4 --task "
    early = example(start + "test", tmp_path)
    assert early.returncode and "train first: --task train" in early.stderr
    for task in ("train", "test", "predict"):
        done = example(start + task, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (tmp_path / "runs/vision").iterdir()
    assert json.loads((run / "receipt.json").read_text())["world"].startswith("2,")
    matrix = list(csv.reader((run / "test/confusion_matrix.csv").read_text().splitlines()))
    assert sum(int(x) for row in matrix[1:] for x in row[1:]) == 64
    together = (run / "predict/predictions.csv").read_text()
    names = [row[0] for row in csv.reader(together.splitlines())][1:]
    assert names == [f"{i:02d}.png" for i in range(10)]
    alone = example(f"python main.py --config configs/ddp_example.yaml --task predict --resume {run}", tmp_path)
    assert alone.returncode == 0, alone.stderr[-3000:]
    for one, other in zip(
        csv.reader((run / "predict/predictions.csv").read_text().splitlines()),
        csv.reader(together.splitlines()),
        strict=True,
    ):
        assert one[:2] == other[:2]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.environ.get("LOCKSTEP_FASHION") != "1", reason="takes many minutes; LOCKSTEP_FASHION=1 runs it")
@pytest.mark.skipif(not FASHION.is_dir(), reason="apt-get install dataset-fashion-mnist brings the data")
def test_a_resnet18_passes_90_percent_on_the_real_fashion_mnist(tmp_path: Path) -> None:
    fit("vision", tmp_path / "run", "--preset", "fashion")
    assert test.run([str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "run/test/metrics.json").read_text())["accuracy"] > 0.9
