"""What a test leaves to look at: a table of the classes and a picture of the confusion matrix."""

import csv
from pathlib import Path

from torch import Tensor

from .losses import ious


def iou_table(matrix: Tensor, names: tuple[str, ...], file: Path) -> Path:
    """One row a class: IoU (empty if it is neither there nor predicted), pixels of it, pixels given to it, both."""
    beside = file.with_name(f".{file.name}.tmp")
    with beside.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["class", "name", "iou", "pixels", "predicted", "both"])
        for k, (name, iou) in enumerate(zip(names, ious(matrix).tolist(), strict=True)):
            counts = (int(matrix[k].sum()), int(matrix[:, k].sum()), int(matrix[k, k]))
            writer.writerow([k, name, "" if iou != iou else f"{iou:.6f}", *counts])
    beside.replace(file)
    return file


def confusion_picture(matrix: Tensor, names: tuple[str, ...], file: Path) -> Path:
    """Bars of each class's IoU beside the confusion matrix, for the classes that occur."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install 'lockstep-train[plots]'") from None
    there = [k for k, iou in enumerate(ious(matrix).tolist()) if iou == iou]
    values, shown = ious(matrix)[there].tolist(), [names[k] for k in there]
    share = matrix[there][:, there] / matrix[there].sum(1, keepdim=True).clamp(min=1)
    size = max(3.5, 0.4 * len(there))
    figure = Figure(figsize=(2.2 * size, size), layout="constrained", dpi=120)
    bars, square = figure.subplots(1, 2)
    bars.barh(range(len(there)), values, color="#4c72b0")
    bars.set_yticks(range(len(there)), shown)
    bars.set(xlim=(0, 1), xlabel="IoU", title=f"mIoU {sum(values) / max(1, len(values)):.3f}")
    bars.invert_yaxis()
    for row, value in enumerate(values):
        inside = value > 0.85
        bars.text(value + (-0.02 if inside else 0.02), row, f"{value:.2f}", va="center",
                  ha="right" if inside else "left", color="white" if inside else "black")  # fmt: skip
    colours = square.imshow(share.numpy(), vmin=0, vmax=1, cmap="Blues")
    square.set_xticks(range(len(there)), shown, rotation=60, ha="right")
    square.set_yticks(range(len(there)), shown)
    square.set(xlabel="predicted", ylabel="true", title="share of a class's pixels")
    figure.colorbar(colours, ax=square, shrink=0.8)
    beside = file.with_name(f".{file.stem}.tmp.png")
    figure.savefig(beside)
    beside.replace(file)
    return file
