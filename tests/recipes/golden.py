"""Golden losses: what the first ten steps of a recipe gave when they were last looked at.

`PYTHONPATH=tests python -m recipes.golden dit jit` writes those of some recipes anew, where a change was meant.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine import trainer_for
from processes import ROOT

from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.registry import find


def fit(recipe: str, folder: Path, *flags: str) -> None:
    """Train on the CPU, in this process."""
    request = parse(find(recipe), ["--device", "cpu", "--no_tensorboard", "--out", str(folder), *flags], "test")
    trainer_for(request, World()).fit()


def logged(folder: Path, name: str = "loss") -> list[float]:
    """All values of one name in metrics.jsonl."""
    return [x[name] for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if name in x]


def golden(recipe: str) -> Any:
    return json.loads(_file(recipe).read_text())


def _file(recipe: str) -> Path:
    return ROOT / "tests/golden" / f"{recipe}.json"


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as made:
            losses = importlib.import_module(f"recipes.test_{chosen}_learns").ten_steps(Path(made) / "run")
        _file(chosen).write_text(json.dumps(losses, indent=2) + "\n")
