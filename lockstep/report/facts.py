"""What a run's folder says of the run, for the page; nothing is asked of the recipe, and nothing is executed."""

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import printable
from ..plots import read_metrics
from ..rundir import read_receipt
from ..watch.times import FILE as TIMES

_ROWS = (
    "recipe", "parameters", "data", "devices", "world", "global batch", "length", "learning rate", "optimizer",
    "precision", "exact", "folder", "resumes",
)  # fmt: skip
"""The rows of the receipt that are shown; the other keys of receipt.json are for programs."""
_LAST_MESSAGES = 200


@dataclass
class RunFacts:
    """One run, as its folder describes it."""

    folder: Path
    receipt: dict[str, Any]
    metrics: dict[str, dict[int, float | None]]
    times: list[Counter[str]] = field(default_factory=list)
    """Of each rank, the seconds by kind of work."""
    history: dict[str, Any] = field(default_factory=dict)
    """The last line of the history of an exact run."""
    messages: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "RunFacts":
        receipt = read_receipt(folder)
        if not receipt:
            raise ValueError(f"{folder} is not a run's folder: it has no receipt.json that can be read")
        log = folder / "log.txt"
        messages = log.read_text(errors="replace").splitlines()[-_LAST_MESSAGES:] if log.is_file() else []
        history = list(json_lines(folder / "history.jsonl"))
        metrics = read_metrics(folder / "metrics.jsonl", everything=True)
        return cls(folder, receipt, metrics, read_times(folder), history[-1] if history else {}, messages)

    @property
    def name(self) -> str:
        return printable(
            f"{self.folder.parent.name}/{self.folder.name}" if self.folder.parent.name else str(self.folder)
        )

    @property
    def recipe(self) -> str:
        return str(self.receipt.get("recipe", "")).partition(":")[0]

    @property
    def step(self) -> int:
        return max((max(series) for series in self.metrics.values() if series), default=0)

    @property
    def n_steps(self) -> int:
        return int(self.receipt.get("n_steps") or self.step)

    @property
    def status(self) -> str:
        return "complete" if self.step >= self.n_steps else f"at step {self.step:,} of {self.n_steps:,}"

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [(name, printable(str(self.receipt[name]))) for name in _ROWS if name in self.receipt]

    @property
    def notes(self) -> list[str]:
        return [printable(str(note)) for note in self.receipt.get("notes", [])]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.receipt.get("settings", {}))

    @property
    def launches(self) -> list[dict[str, Any]]:
        return list(self.receipt.get("launches", []))

    def last(self, name: str) -> float | None:
        """Return the last value of something that was logged."""
        series = self.metrics.get(name, {})
        return series[max(series)] if series else None

    def figures(self) -> list[tuple[str, str]]:
        """Return the numbers that come first on the page."""
        shown: list[tuple[str, str]] = [("steps", f"{self.step:,} of {self.n_steps:,}")]
        for name in ("loss", *(name for name in self.metrics if name.startswith("val/"))):
            if (value := self.last(name)) is not None:
                shown.append((f"last {name}", f"{value:.5g}"))
        speeds = [value for value in self.metrics.get("samples_per_second", {}).values() if value is not None]
        if speeds:
            shown.append(("samples per second, median", f"{statistics.median(speeds):,.0f}"))
        total = max((sum(rank.values()) for rank in self.times), default=0.0)
        if total:
            shown.append(("time", duration(total)))
        return [*shown, ("ranks", str((self.launches or [{}])[-1].get("world", "")) or "unknown")]

    def checks(self) -> list[tuple[str, str, bool]]:
        """Return what was checked, what came out, and whether that is good."""
        skipped, failed = int(self.last("skipped_steps") or 0), int(self.last("failed_outputs") or 0)
        proven, corrupt = self.last("epochs_proven"), int(self.last("corruptions") or 0)
        ranks = max((int(launch.get("world", 1) or 1) for launch in self.launches), default=1)
        same = "compared at every log and checkpoint; no difference" if ranks > 1 else "one rank, nothing to compare"
        found = [
            ("replicas hold the same tensors", same, True),
            ("each sample once per epoch", _epochs(int(proven or 0)), True),
            (
                "gradients are finite",
                f"{skipped} of {self.step:,} steps skipped" if skipped else "in every step",
                not skipped,
            ),
        ]
        if corrupt:
            found[0] = ("replicas hold the same tensors", f"{corrupt} time(s) not; see the messages", False)
        if failed:
            found.append(("samples and scores", f"{failed} could not be made or written", False))
        if self.history:
            found.append(
                (f"digest of the weights after step {self.history.get('step')}", str(self.history.get("weights")), True)
            )
            found.append(("chain of the whole run up to there", str(self.history.get("chain")), True))
        seconds = self.last("watch_seconds")
        total = max((sum(rank.values()) for rank in self.times), default=0.0)
        if seconds is not None and total:
            found.append(("cost of the checks", f"{seconds / total:.2%} of the time", True))
        return found

    def command(self) -> str:
        """Return the command that repeats the run."""
        launch = (self.launches or [{}])[0]
        world = int(launch.get("world", 1) or 1)
        spec, own = str(self.receipt.get("spec", "")), ":" in str(self.receipt.get("spec", ""))
        words = ["lockstep", "train", spec if own and ".py" in spec else self.recipe]
        words += ["--config", str(self.folder / "config.yaml"), "--out", f"{self.folder}-again"]
        return printable(shlex.join(words + (["--nproc", str(world)] if world > 1 else [])))


def _epochs(proven: int) -> str:
    if not proven:
        return "no sample twice so far; the first epoch is not over"
    return f"{proven} whole epoch{'s' if proven > 1 else ''}"


def read_times(folder: Path) -> list[Counter[str]]:
    """Return, for each rank, the seconds by kind of work over the whole run."""
    totals: list[Counter[str]] = []
    for line in json_lines(folder / TIMES):
        for number, rank in enumerate(line.get("ranks", [])):
            while len(totals) <= number:
                totals.append(Counter())
            totals[number].update(rank)
    return totals


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; a line that cannot be read is left out."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content


def differing_settings(runs: list[RunFacts]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all runs, each with its values."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [str(run.settings.get(name, "not set")) for run in runs] for name in names}
    return [(name, found) for name, found in values.items() if len(set(found)) > 1 and name != "out"]


def duration(seconds: float) -> str:
    """Return a length of time in words: `3 h 12 min`, `4 min 5 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
