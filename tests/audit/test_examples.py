"""Lockstep's own examples pass its own audit."""

import shutil
from pathlib import Path

import pytest
from loops import FOLDER, NAMES
from processes import ROOT

from audit.zoo import audited
from lockstep.commands import data

EXAMPLES = {
    "dit": ([], "train.py --num_register_tokens 4"),
    "jit": (["jit", "data"], "train.py --data_path ./data/train --batch_size 4"),
    "scribble": ([], "train.py --distributed"),
    "protein": (["protein", "data/cache"], "train.py --pdb_path data/cache --cache_dir data/cache"),
    "vision": (["vision", "data"], "main.py --config configs/ddp_example.yaml --task train"),
}


def audit_of_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> list[str]:
    """What is found in a copy of an example."""
    words, command = EXAMPLES[name]
    ignored = shutil.ignore_patterns("runs", "data", "log", "__pycache__")
    folder = shutil.copytree(ROOT / "examples" / name, tmp_path / name, ignore=ignored)
    monkeypatch.chdir(folder)
    if words:
        data.run(words)
    return audited(command.split(), str(folder), device, LOCKSTEP_SMOKE="2")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit_of_example(name, tmp_path, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_ones_own_passes(name: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / f"{name}.py", tmp_path)
    assert audited([f"{name}.py"], str(tmp_path)) == []
