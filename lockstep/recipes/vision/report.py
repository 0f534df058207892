"""What a test and a prediction of `vision` write: tables, plots, masks in colour."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..confusion import per_class
from ..overlays import overlay, palette
from ..pixels import read_rgb, save_image
from ..report import draw_bars, draw_confusion, figure, plot_side, save_figure, write_table

LISTED = 8
"""Masks that a prediction lists."""


def write_test(matrix: Tensor, names: Sequence[str], folder: Path, of_pixels: bool) -> list[Path]:
    """Write the confusion matrix and the metrics per class, as tables and plots."""
    values = per_class(matrix)
    metrics = {"precision": values.precision, "recall": values.recall}
    metrics |= {"dice": values.f1, "iou": values.iou} if of_pixels else {"f1": values.f1}
    counted = "pixels" if of_pixels else "images"
    rows = [
        (name, int(matrix[k].sum()), *(f"{float(metric[k]):.6f}" for metric in metrics.values()))
        for k, name in enumerate(names)
    ]
    cells = ((name, *row) for name, row in zip(names, matrix.tolist(), strict=True))
    return [
        write_table(folder / "per_class.csv", ("class", counted, *metrics), rows),
        write_table(folder / "confusion_matrix.csv", ("truth \\ prediction", *names), cells),
        *_write_plots(matrix, names, folder, "IoU" if of_pixels else "F1", values.iou if of_pixels else values.f1),
    ]


def _write_plots(matrix: Tensor, names: Sequence[str], folder: Path, metric: str, values: Tensor) -> list[Path]:
    side = plot_side(len(names))
    square, axes = figure(side + 0.8, side)
    draw_confusion(square, axes, matrix, names)
    bars, axes = figure(6.5, 0.6 * side)
    draw_bars(axes, values, names, metric)
    return [
        save_figure(square, folder / "confusion_matrix.png"),
        save_figure(bars, folder / f"per_class_{metric.lower()}.png"),
    ]


def with_palette(mask: np.ndarray) -> Image.Image:
    """Return the mask as a picture whose values are the classes and whose palette has their colours."""
    picture = Image.fromarray(mask)
    picture.putpalette(palette().tobytes())
    return picture


def write_labels(
    predictions: list[tuple[int, float]], names: list[str], classes: Sequence[str], folder: Path
) -> list[Path]:
    """Write predictions.csv with class and probability of each image."""
    rows = [(name, classes[k], f"{p:.6f}") for name, (k, p) in zip(names, predictions, strict=True)]
    return [write_table(folder / "predictions.csv", ("file", "class", "probability"), rows)]


def write_masks(
    predictions: list[Tensor], names: list[str], files: list[Path] | None, classes: Sequence[str], folder: Path
) -> list[Path]:
    """Write all masks, and predictions.csv with the fraction of each class; return it and the first masks."""
    made, rows = list[Path](), list[tuple[Any, ...]]()
    for i, (mask, name) in enumerate(zip(predictions, names, strict=True)):
        made.append(write_mask(mask, files[i] if files else None, name, folder))
        fractions = torch.bincount(mask.flatten().long(), minlength=len(classes)) / mask.numel()
        rows.append((name, made[-1].relative_to(folder), *(f"{fraction:.6f}" for fraction in fractions.tolist())))
    return [write_table(folder / "predictions.csv", ("file", "mask", *classes), rows), *made[:LISTED]]


def write_mask(mask: Tensor, file: Path | None, name: str, folder: Path) -> Path:
    """Write the mask in the size of its image and, where there is an image file, the image tinted by it."""
    values = mask.to(torch.uint8).numpy()
    # a.jpg and a.webp may lie in one folder: both endings stay in the name.
    name = name if name.endswith(".png") else f"{name}.png"
    if file is not None:
        image = read_rgb(file)
        values = np.array(Image.fromarray(values).resize(image.size, Image.Resampling.NEAREST))
        save_image(Image.fromarray(overlay(np.array(image), values)), folder / "overlays" / name)
    return save_image(with_palette(values), folder / "masks" / name)
