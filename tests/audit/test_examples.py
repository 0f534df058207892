"""Lockstep's own examples pass its own audit."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from multi.test_launch import ROOT, environment

EXAMPLES = {
    "dit": ("", "train.py --num_register_tokens 4"),
    "jit": ("lockstep data jit data", "train.py --data_path ./data/train --batch_size 4"),
    "scribble": ("", "train.py --distributed"),
    "protein": ("lockstep data protein data/cache", "train.py --pdb_path data/cache --cache_dir data/cache"),
    "vision": ("lockstep data vision data", "main.py --config configs/ddp_example.yaml --task train"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes(name: str, tmp_path: Path) -> None:
    prepare, script = EXAMPLES[name]
    folder = tmp_path / name
    shutil.copytree(
        ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("runs", "data", "log", "__pycache__")
    )
    command = f"{prepare or ':'} && lockstep audit --steps 0 --json {tmp_path}/audit.json -- {script}"
    variables = environment(LOCKSTEP_SMOKE="2")
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    verdict = json.loads((tmp_path / "audit.json").read_text())
    assert done.returncode == 0 and verdict["findings"] == [], done.stdout
    assert [rank["steps"] for rank in verdict["ranks"]] == [2, 2]
