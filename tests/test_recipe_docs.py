"""Every recipe of docs/your-own-recipe.md trains, as it stands there."""

import re
from pathlib import Path

import pytest
from processes import ROOT

from lockstep import cli
from lockstep.recipe import CAPABILITIES

PAGE = (ROOT / "docs/your-own-recipe.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name])
    words = ["--device", "cpu", "--n_steps", "4", "--out", "run", "--no_tensorboard", "--no_curves"]
    assert cli._dispatch(["train", name, *words]) == 0
    if name == "metrics.py":
        Path("points.txt").write_text("0 0 0 0\n1 1 1 1\n")
        assert cli._dispatch(["predict", "run", "points.txt", "--device", "cpu"]) == 0
        assert len(Path("run/predict/labels.txt").read_text().split()) == 2


def test_every_capability_is_on_the_page() -> None:
    assert len(FILES) == 5
    assert [c.__name__ for c in CAPABILITIES if f"`{c.__name__}`" not in PAGE] == []
