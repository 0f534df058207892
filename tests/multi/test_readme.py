"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest
from processes import ROOT

from multi.test_launch import run

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_recipe_in_the_readme_trains(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(# mine\.py\n.*?)```", README, re.S).group(1))  # type: ignore[union-attr]
    command = re.search(r"^lockstep train mine\.py:Mine.*$", README, re.M).group(0)  # type: ignore[union-attr]
    done = run([*command.split(), "--out", "here"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r" loss ([\d.e-]+)  lr", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2, done.stdout


def test_every_folder_in_the_map_exists() -> None:
    table = README.split("## The folders")[1]
    folders = re.findall(r"^\| `([\w/]+/)` \|", table, re.M)
    assert len(folders) >= 7 and all((ROOT / folder).is_dir() for folder in folders)


def test_the_picture_is_there() -> None:
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).stat().st_size > 10_000


@pytest.mark.slow
def test_samples_are_made_afterwards_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The README's `lockstep sample RUN --n 64 --cfg 2.5`, of a model that has seen two steps."""
    flags = ["--model", "DiT-Nano/8", "--out", "run", "--n_steps", "2", "--batch_size", "2", "--fid_every", "0"]
    assert run(["lockstep", "train", "dit", *flags], tmp_path, LOCKSTEP_SMOKE="2").returncode == 0
    command = re.search(r"^lockstep sample RUN (--n \d+ --cfg [\d.]+)", README, re.M).group(1).split()  # type: ignore[union-attr]
    command[1] = "12"
    pictures = []
    for nproc in ("1", "2"):
        where = ["--steps", "2", "--nproc", nproc, "--out", f"made{nproc}", "--batch_size", "5"]
        done = run(["lockstep", "sample", "run", *command, *where], tmp_path)
        assert done.returncode == 0, done.stderr
        (picture,) = (tmp_path / f"made{nproc}").glob("*cfg2.5*.png")
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]
