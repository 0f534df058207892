"""`lockstep predict`: what it prints."""

from pathlib import Path

import pytest

from lockstep import cli

RECIPE = """
import tiny
from lockstep import Predicts

class Mine(tiny.Plain, Predicts):
    name = "mine"

    def predict_dataset(self, path):
        return tiny.Points(12)

    def predict_batch(self, model, batch):
        return model(batch["x"]).sum(1).tolist()

    def save_predictions(self, predictions, dataset, folder):
        files = [folder / f"{i:02d}.txt" for i in range(len(predictions))]
        for file, value in zip(files, predictions, strict=True):
            file.write_text(str(value))
        return files
"""


def test_predict_prints_a_summary_and_not_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(RECIPE)
    assert cli._dispatch(["train", "mine.py", "--n_steps", "2", "--device", "cpu", "--out", "run"]) == 0
    capsys.readouterr()
    assert cli._dispatch(["predict", "run", "mine.py", "--device", "cpu"]) == 0
    summary, where, *files = capsys.readouterr().out.splitlines()
    assert summary == "12 predictions"
    assert where == "by the plain weights of step 2; all files are in run/predict, among them:"
    assert files == [f"run/predict/{i:02d}.txt" for i in range(10)]
