"""What a test leaves to look at: tables as CSV, bars and confusion matrices as PNG."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..files import replacing, write_text

_MAX_NAMES = 30
"""Classes up to which their names stand beside a plot."""
_MAX_NUMBERS = 12
"""Classes up to which the cells of a confusion matrix hold numbers."""


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue())
    return path


def figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure and looks for a display
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'lockstep-train[plots]'") from None
    made = Figure(figsize=(width, height), layout="constrained", dpi=110)
    return made, made.subplots(1, columns)


def save_figure(made: Any, path: Path) -> Path:
    with replacing(path) as temporary:
        made.savefig(temporary, format="png")
    return path


def draw_confusion(made: Any, axes: Any, matrix: Tensor, names: Sequence[str]) -> None:
    """Rows are true classes, as fractions of the row, so that large classes do not hide small ones."""
    fractions = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).double().numpy()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    made.colorbar(image, ax=axes, shrink=0.8, label="fraction of the true class")
    if len(names) <= _MAX_NAMES:
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axes.set_yticks(range(len(names)), names)
    if len(names) <= _MAX_NUMBERS:
        for (truth, prediction), value in np.ndenumerate(fractions):
            if value >= 0.005:
                colour = "white" if value > 0.5 else "black"
                axes.text(prediction, truth, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="prediction", ylabel="truth", title="Confusion matrix")


def draw_bars(axes: Any, values: Tensor, names: Sequence[str], metric: str) -> None:
    """One horizontal bar per class, for values in [0, 1]."""
    bars = axes.barh(range(len(names)), values.nan_to_num().tolist(), color="#3b74b4")
    axes.set(xlim=(0, 1.12), xlabel=metric, title=f"{metric} per class")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) <= _MAX_NAMES:
        axes.set_yticks(range(len(names)), names)
        axes.bar_label(bars, [f"{value:.3f}" for value in values.tolist()], padding=3, fontsize=8)


def plot_side(classes: int) -> float:
    """Return the inches per side that a confusion matrix of so many classes needs."""
    return 3.5 + 0.45 * min(classes, _MAX_NAMES)
