"""What a run has logged, as numbers and as a picture: one panel for each value."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from .files import replacing

NOT_DRAWN = {
    "step", "time", "epoch", "watch_seconds", "epochs_proven", "skipped_steps", "checkpoint_pause_seconds",
    "failed_outputs", "straggler", "straggler_lost_share", "data_wait_share",
}  # fmt: skip
"""Values of metrics.jsonl that say nothing of the training."""
_MAX_PANELS = 12
Series = dict[int, float | None]
"""By step; None for a value that is not finite."""
Points = dict[int, float]


def read_metrics(path: Path, everything: bool = False) -> dict[str, Series]:
    """Return the values of a metrics.jsonl by name; nothing if there is none, and no line that cannot be read.

    `everything`: also those that say nothing of the training.
    """
    left_out = {"step", "time"} if everything else NOT_DRAWN
    found: dict[str, Series] = {}
    for row in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(row)
            values, step = ((name, value) for name, value in line.items() if name not in left_out), int(line["step"])
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        for name, value in values:
            if value is None or isinstance(value, int | float):
                found.setdefault(name, {})[step] = value
    return found


def finite(metrics: Mapping[str, Series]) -> dict[str, Points]:
    """Return what can be drawn: the values that are finite, of names that have any."""
    kept = {name: {step: v for step, v in series.items() if v is not None} for name, series in metrics.items()}
    return {name: points for name, points in kept.items() if points}


def panels(names: Collection[str], same: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """Return, by title of a panel and by label of a line, the names of the logged values.

    A value and its counterpart of validation share a panel if `same(name)` says that they are the same quantity.
    """
    titles: dict[str, dict[str, str]] = {}
    for name in names:
        bare = name.removeprefix("val/")
        label = "validation" if name.startswith("val/") else "training"
        alone = bare not in names or f"val/{bare}" not in names or same(bare)
        titles.setdefault(bare if alone else f"{bare} ({label})", {})[label] = name
    return titles


def draw(panels: Mapping[str, Mapping[str, Points]], path: Path) -> None:
    """Write a picture of finite values: one panel for each of them, in it a line for each label."""
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for

    shown = list(panels.items())[:_MAX_PANELS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    for i, (title, lines) in enumerate(shown):
        axes = figure.add_subplot(rows, columns, i + 1, title=title, xlabel="step")
        for label, points in lines.items():
            mark = "o" if len(points) < 30 else None
            axes.plot(*zip(*sorted(points.items()), strict=True), marker=mark, markersize=3, linewidth=1.2, label=label)
        if len(lines) > 1:
            axes.legend()
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
