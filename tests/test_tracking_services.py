"""`--track`: MLflow and Trackio with the real packages, without a network; which trackers a run has."""

import json
import math
import sqlite3
from pathlib import Path

import pytest
from PIL import Image

from lockstep.config import Run
from lockstep.trackers import Console, MLflow, Trackers, Trackio, for_run


@pytest.mark.parametrize(
    ("settings", "services"),
    [
        ({}, ["tensorboard"]),
        ({"track": "none"}, []),
        ({"tensorboard": False}, []),
        ({"use_wandb": True}, ["tensorboard", "wandb"]),
        ({"track": "trackio, mlflow"}, ["mlflow", "trackio"]),
        ({"track": "tensorboard,wandb", "tensorboard": False}, ["wandb"]),
    ],
)
def test_the_services_of_a_run(settings: dict[str, object], services: list[str], tmp_path: Path) -> None:
    run = Run(**settings)  # type: ignore[arg-type]
    assert run.services() == services
    makers = for_run(run, tmp_path, Console(1, file=None, terminal=False), {}, None, lambda _: True, "id")
    assert len(makers) == 4 + len(services)  # console, metrics.jsonl, curves.png, report.html


def test_an_unknown_service_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"track is one or several of tensorboard, wandb, mlflow, trackio with .*wanbd"
    ):
        Run(track="tensorboard,wanbd")


@pytest.mark.parametrize("service", ["mlflow", "trackio"])
def test_a_package_that_is_missing_is_named_with_the_extra(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, service, None)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    said = list[str]()
    makers = for_run(
        Run(track=service), tmp_path, Console(1, file=None, terminal=False), {}, None, lambda _: True, "id"
    )
    Trackers({name: make for name, make in makers.items() if name in ("MLflow", "Trackio")}, said.append)
    assert len(said) == 1 and "is off" in said[0] and f"pip install 'lockstep-train[{service}]'" in said[0]


def picture(folder: Path) -> Path:
    Image.new("RGB", (8, 8)).save(folder / "grid.png")
    return folder / "grid.png"


@pytest.mark.slow
def test_mlflow_holds_values_settings_and_files_of_a_run_and_of_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for part in (1, 2):
        tracker = MLflow(tmp_path, "lockstep", "mine", {"lr": 0.1, "data/n": 3}, "run-id")
        tracker.log(10 * part, {"loss": 1 / part, "val/loss": math.nan})
        tracker.media(10 * part, "samples", picture(tmp_path))
        said = tracker.close()
    assert said is not None and said.endswith("mlflow.db")
    client = tracker._client
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1", "data/n": "3"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [(10, 1.0), (20, 0.5)]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/grid.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"grid.png", "mlflow", "mlflow.db"}


@pytest.mark.slow
def test_trackio_holds_the_values_of_a_run_and_of_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    for part in (1, 2):
        tracker = Trackio(tmp_path, "lockstep", "mine", {"lr": 0.1})
        tracker.log(10 * part, {"loss": 1 / part})
        tracker.media(10 * part, "samples", picture(tmp_path))
        said = tracker.close()
    where = Path(tracker._where)  # of this process: where the first run was
    assert said == f"TRACKIO_DIR={where} trackio show" and not capsys.readouterr().out
    with sqlite3.connect(next(where.glob("*.db"))) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'mine' ORDER BY id").fetchall()
    values = [(step, json.loads(text)) for step, text in rows]
    assert {(step, value["loss"]) for step, value in values if "loss" in value} == {(10, 1.0), (20, 0.5)}
    assert any("samples" in value for _, value in values)
