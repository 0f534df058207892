"""What a run writes into its own folder: metrics.jsonl, curves.png, report.html."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..files import StepLines
from ..plots import draw, finite, panels, read_metrics
from .tracker import Tracker


class JsonLines(Tracker):
    """One JSON object a line: {"step": ..., "time": seconds since 1970, **values}, handed to the disk at once.

    What is not finite is written as null: JSON has no word for it. Lines of steps after `resume_step`, left by a run
    that got further than its last checkpoint, are removed (with -1, all).
    """

    retried = True  # a full disk may be freed

    def __init__(self, path: Path, resume_step: int | None = None, clock: Callable[[], float] = time.time):
        self._lines, self._clock = StepLines(path, math.inf if resume_step is None else resume_step), clock

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.append({"step": step, "time": round(self._clock(), 3), **finite})

    def close(self) -> str | None:
        complete = self._lines.close()
        return None if complete else f"{self._lines.path} lacks its last lines: they could not be written"


class Curves(Tracker):
    """When all is over, a picture of metrics.jsonl: one panel for each quantity.

    Training and validation share a panel only where they are the same quantity, as `same_in_validation(name)` says.
    """

    def __init__(self, folder: Path, same_in_validation: Callable[[str], bool]):
        self._folder, self._same = folder, same_in_validation
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[plots]', or --no_curves") from error

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        series = finite(read_metrics(self._folder / "metrics.jsonl"))
        if all(len(points) < 2 for points in series.values()):  # of a point there is no curve
            return
        lines = panels(series, self._same)
        draw({k: {label: series[n] for label, n in v.items()} for k, v in lines.items()}, self._folder / "curves.png")


class Report(Tracker):
    """When all is over, `report.html`: the page that `lockstep report` writes."""

    def __init__(self, folder: Path, same_in_validation: Callable[[str], bool]):
        self._folder, self._same = folder, same_in_validation

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        from ..report.html import write_page  # its libraries are needed once, at the end

        write_page([self._folder], self._folder / "report.html", self._same)
