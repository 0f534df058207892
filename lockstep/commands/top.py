"""`lockstep top [RUN]`: all ranks of a running job, live, in a second terminal."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..files import printable
from ..options import TopFlags
from ..plots import read_metrics
from ..rundir import newest_of_all, read_receipt
from ..runlock import is_held
from ..watch.live import read_live

SILENT_SECONDS = 20.0
"""A rank without news for so long is marked."""
_MESSAGES = 4


def run(words: list[str]) -> int:
    """Exit status 1 if the run is not running."""
    named = [word for word in words[:1] if not word.startswith("-")]
    flags = tyro.cli(TopFlags, args=words[len(named) :], prog="lockstep top [RUN]", use_underscores=True)
    folder = Path(named[0]) if named else newest_of_all()
    if folder is None or not (folder / "receipt.json").is_file():
        what = f"{folder} is not a run's folder: it has no receipt.json" if folder else "there is no run in runs/"
        raise ValueError(f"{what}; say which one: lockstep top RUN")
    view = View(folder)
    if flags.once:
        Console().print(view.draw())
        return 0 if view.running else 1
    with Live(view.draw(), screen=Console().is_terminal, refresh_per_second=4) as live:
        while view.running:
            time.sleep(flags.every)
            live.update(view.draw())
    Console().print(view.draw())
    return 0


@dataclass
class View:
    """What is shown of a run; drawn again and again, as speeds follow from two looks."""

    folder: Path
    running: bool = False
    _before: dict[str, Any] | None = None
    _shares: dict[int, float] = field(default_factory=dict)
    """By rank, the share of the time between the last two looks that it waited for data."""

    def draw(self) -> Group:
        """Return the picture of this moment."""
        live, self.running = read_live(self.folder), is_held(self.folder)
        parts: list[Text | Table] = [self._head()]
        if live is not None:
            self._measure(live)
            parts.append(self._ranks(live))
        elif self.running:
            parts.append(Text("the ranks have not reported yet", style="dim"))
        if not self.running:
            parts.append(Text("the run is not running", style="bold"))
        return Group(*parts, *self._messages())

    def _head(self) -> Text:
        receipt = read_receipt(self.folder)
        values = last_values(self.folder)
        total = receipt.get("n_steps")
        name = str(receipt.get("recipe", "")).partition(":")[0]
        lines = [f"{name or 'run'}  {self.folder}"]
        if "step" in values:
            step = int(values.pop("step"))
            share = f" ({step / total:.0%})" if total else ""
            lines.append(f"step {step:,}{f' of {total:,}' if total else ''}{share}  {left(self.folder, step, total)}")
        turns = [
            name for name in values if name.endswith(("_loss", "_lr", "_grad_norm")) and not name.startswith("val/")
        ]
        shown = ["loss", *turns, "lr", "grad_norm", "samples_per_second"]
        shown += [name for name in values if name.startswith("val/")]
        lines.append("  ".join(f"{name} {values[name]:.5g}" for name in shown if name in values))
        return Text(printable("\n".join(line for line in lines if line)))

    def _measure(self, live: dict[str, Any]) -> None:
        before, self._before = self._before, live
        if before is None or live["time"] <= before["time"]:
            self._before = before or live
            return
        seconds, old = live["time"] - before["time"], {rank["rank"]: rank for rank in before["ranks"]}
        for rank in live["ranks"]:
            if rank["rank"] in old:
                waited = rank["data_seconds"] - old[rank["rank"]]["data_seconds"]
                self._shares[rank["rank"]] = min(1.0, max(0.0, waited / seconds))

    def _ranks(self, live: dict[str, Any]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("rank", "phase", "step", "data wait", "memory", "GPU", "idle", "process"):
            table.add_column(title, justify="left" if title in ("phase", "process") else "right", no_wrap=True)
        for rank in live["ranks"]:
            idle = rank["idle"] + max(0.0, time.time() - live["time"])
            style = "dim" if rank["done"] else "red" if idle > SILENT_SECONDS else ""
            share, busy = self._shares.get(rank["rank"]), rank.get("utilization")
            table.add_row(
                str(rank["rank"]), "done" if rank["done"] else rank["phase"], f"{rank['step']:,}",
                "" if share is None else f"{share:.0%}", memory(rank), "" if busy is None else f"{busy} %",
                f"{idle:.0f} s" if idle >= 5 else "", f"{rank['pid']} on {rank['host']}" if rank["pid"] else "",
                style=style,
            )  # fmt: skip
        return table

    def _messages(self) -> list[Text]:
        """Return the last messages of the run."""
        log = self.folder / "log.txt"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return [Text(printable(line), style="dim") for line in lines[-_MESSAGES:]]


def last_values(folder: Path) -> dict[str, float]:
    """Return the last value of everything that the run has logged, and its step."""
    metrics = read_metrics(folder / "metrics.jsonl")
    last = {name: series[max(series)] for name, series in metrics.items()}
    steps = [max(series) for series in metrics.values()]
    return {name: math.nan if value is None else value for name, value in last.items()} | (
        {"step": max(steps)} if steps else {}
    )


def left(folder: Path, step: int, total: int | None) -> str:
    """Return the time to the end, at the speed of the last lines of metrics.jsonl."""
    lines = []
    for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines()[-50:]:
        try:
            lines.append((json.loads(line)["step"], json.loads(line)["time"]))
        except (ValueError, KeyError, TypeError):
            continue
    if not total or len(lines) < 2 or lines[-1][0] <= lines[0][0]:
        return ""
    (first, then), (last, now) = lines[0], lines[-1]
    seconds = max(0, total - step) * (now - then) / (last - first)
    return f"left {int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def memory(rank: Mapping[str, Any]) -> str:
    """Return the memory of a rank, and on its device in all."""
    if not rank.get("memory"):
        return ""
    total = f" of {rank['memory_total'] / 1e9:.0f}" if rank.get("memory_total") else ""
    return f"{rank['memory'] / 1e9:.1f}{total} GB"
