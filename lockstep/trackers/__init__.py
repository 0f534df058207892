"""What values are logged to: the console, metrics.jsonl, TensorBoard, W&B, MLflow, Trackio.

    trackers = Trackers({"console": lambda: Console(20_000), ...}, warn)   on rank 0; Trackers({}) on the others
    every step:       trackers.advance(step)                               waits for nothing
    every log_every:  trackers.log(step, {"loss": 0.5, "lr": 1e-4, "samples_per_second": 812.0})
    sometimes:        trackers.media(step, "samples", path), trackers.message("a checkpoint is written")
    in a `finally`:   trackers.close()

No tracker can stop a run. One that fails, when it is made or later, is named with the reason, once, and dropped.
Only metrics.jsonl is tried again at every later log, as a full disk may be freed; until then its lines stay in memory.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import Run
from .console import Console, Screen
from .files import Curves, JsonLines, Report
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .tracker import Tracker, Trackers
from .trackio import Trackio
from .wandb import Wandb

__all__ = [
    "Console",
    "Curves",
    "JsonLines",
    "MLflow",
    "Report",
    "Screen",
    "TensorBoard",
    "Tracker",
    "Trackers",
    "Trackio",
    "Wandb",
    "for_run",
]


def for_run(
    run: Run,
    folder: Path,
    console: Console,
    settings: Mapping[str, Any],
    resumed: int | None,
    same_in_validation: Callable[[str], bool],
    run_id: str,
) -> dict[str, Callable[[], Tracker]]:
    """Return, by name, how to make each tracker that a run's settings ask for.

    `resumed` is the step it resumes at; `same_in_validation(name)`: whether a value of training and of validation are
    the same quantity. `run_id`: by which services know the run when it is resumed.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        "the console": lambda: console,
        "metrics.jsonl": lambda: JsonLines(folder / "metrics.jsonl", resumed),
    }
    if run.curves:
        makers["curves.png"] = lambda: Curves(folder, same_in_validation)
    if run.report:
        makers["report.html"] = lambda: Report(folder, same_in_validation)
    project, name = run.wandb_project, run.wandb_name or folder.name
    events = Path(run.logdir) if run.logdir else folder / "tensorboard"
    services: dict[str, tuple[str, Callable[[], Tracker]]] = {
        "tensorboard": ("TensorBoard", lambda: TensorBoard(events, resumed)),
        "wandb": ("W&B", lambda: Wandb(folder, project, name, settings, run_id)),
        "mlflow": ("MLflow", lambda: MLflow(folder, project, name, settings, run_id)),
        "trackio": ("Trackio", lambda: Trackio(folder, project, name, settings)),
    }
    for service in run.services():
        title, make = services[service]
        makers[title] = make
    return makers
