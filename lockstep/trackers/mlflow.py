"""MLflow: a run in a database of the run's folder, or on the server that MLFLOW_TRACKING_URI names."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .tracker import Tracker

_RUN = "lockstep.run"
"""The tag by which the parts of a resumed run are found to be one."""
_LONGEST = 500
"""Characters of a parameter's value."""


class MLflow(Tracker):
    """A run of the experiment `project`; an earlier part's `run_id` makes it go on."""

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any], run_id: str):
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[mlflow]'") from error
        self._metric, self._uri = Metric, os.environ.get("MLFLOW_TRACKING_URI")
        self._folder = folder.resolve()
        self._client: Any = MlflowClient(tracking_uri=self._uri or f"sqlite:///{self._folder}/mlflow.db")
        self._run = self._find(project, run_id) or self._create(project, name, run_id)
        values = [Param(key, str(value)[:_LONGEST]) for key, value in config.items()]
        known = self._client.get_run(self._run).data.params  # MLflow takes each but once
        new = [value for value in values if value.key not in known]
        for start in range(0, len(new), 100):
            self._client.log_batch(self._run, params=new[start : start + 100])
        self._client.set_terminated(self._run, status="RUNNING")

    def _find(self, project: str, run_id: str) -> str | None:
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            return None
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{_RUN}` = '{run_id}'")
        return found[0].info.run_id if found else None

    def _create(self, project: str, name: str, run_id: str) -> str:
        experiment = self._client.get_experiment_by_name(project)
        files = None if self._uri else (self._folder / "mlflow").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(project, files)
        run: str = self._client.create_run(number, run_name=name, tags={_RUN: run_id}).info.run_id
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._run, metrics=[self._metric(name, float(v), now, step) for name, v in values.items()]
        )

    def media(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._run, str(path), name)

    def close(self) -> str | None:
        failed = sys.exc_info()[0] is not None  # an exception is on its way
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")
        return None if self._uri else f"mlflow ui --backend-store-uri sqlite:///{self._folder}/mlflow.db"
