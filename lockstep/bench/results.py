"""What was measured, as a table, a JSON file and a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..files import replacing, write_text


@dataclass
class Row:
    """One contender on one workload."""

    workload: str
    contender: str
    samples: int
    """In a step."""
    step: float = 0.0
    first_step: float = 0.0
    data_wait: float = 0.0
    device_idle: float | None = None
    memory: int = 0
    peak_share: float | None = None
    """The operations of a step over its time, as a share of the device's fastest matrix product."""
    failed: str = ""
    """Why there are no figures."""

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step if self.step else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"samples_per_second": self.samples_per_second}


def table(workload: str, rows: Sequence[Row]) -> Table:
    """Return the rows of one workload as the terminal shows them."""
    shown = Table(title=f"{workload}, {rows[0].samples} samples per step" if rows else workload)
    columns = ("", "samples/s", "step", "of the peak", "waits for data", "GPU idle", "memory", "first step after")
    for number, title in enumerate(columns):
        shown.add_column(title, justify="left" if number == 0 else "right")
    for row in rows:
        if row.failed:
            shown.add_row(row.contender, f"failed: {row.failed}")
            continue
        shown.add_row(
            row.contender,
            f"{row.samples_per_second:,.4g}" if row.samples_per_second < 1000 else f"{row.samples_per_second:,.0f}",
            f"{1000 * row.step:.4g} ms",
            "" if row.peak_share is None else f"{row.peak_share:.0%}",
            f"{1000 * row.data_wait:.2f} ms",
            "" if row.device_idle is None else f"{1000 * row.device_idle:.2f} ms",
            f"{row.memory / 2**30:.1f} GB",
            f"{row.first_step:.1f} s",
        )
    return shown


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Write everything measured, and what on."""
    write_text(path, json.dumps(facts | {"rows": [row.as_json() for row in rows]}, indent=2) + "\n")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a picture: a panel for each workload, a bar for each contender."""
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for

    measured = [row for row in rows if not row.failed]
    names = list(dict.fromkeys(row.workload for row in measured))
    if not names:
        return
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.8 * lines), layout="constrained")
    for number, name in enumerate(names):
        own = [row for row in measured if row.workload == name][::-1]
        axes = figure.add_subplot(lines, columns, number + 1, title=name, xlabel="samples per second")
        colours = ["#c44e52" if row.contender.startswith("Lockstep") else "#8899aa" for row in own]
        bars = axes.barh([row.contender for row in own], [row.samples_per_second for row in own], color=colours)
        axes.bar_label(bars, [f"{row.samples_per_second:,.0f}" for row in own], padding=2, fontsize=8)
        axes.margins(x=0.18)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
