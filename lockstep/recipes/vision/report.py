"""What a person looks at after a test or a prediction: tables, plots, masks in colour."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...files import write_text
from .metrics import by_class

_WORDS = 30
"""Most classes that are written beside a plot."""
_NUMBERS = 12
"""Most classes for which the cells of a plot hold numbers."""
_OVERLAY = 0.5
_GAP = 2


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue())
    return path


def save_whole(path: Path, save: Callable[[Path], Any]) -> Path:
    """Save beside and rename. The name beside keeps its ending, from which the format follows."""
    beside = path.with_name(f".tmp-{path.name}")
    save(beside)
    beside.replace(path)
    return path


def write_test(matrix: Tensor, names: Sequence[str], folder: Path, of_pixels: bool) -> list[Path]:
    """The confusion matrix and what follows from it for each class, as tables and plots."""
    values = by_class(matrix)
    columns = [("precision", values.precision), ("recall", values.recall)]
    columns += [("dice", values.f1), ("iou", values.iou)] if of_pixels else [("f1", values.f1)]
    rows = [
        (name, int(matrix[k].sum()), *(f"{float(column[k]):.6f}" for _, column in columns))
        for k, name in enumerate(names)
    ]
    title = "IoU" if of_pixels else "F1"
    return [
        write_table(
            folder / "per_class.csv", ("class", "pixels" if of_pixels else "images", *(n for n, _ in columns)), rows
        ),
        write_table(
            folder / "confusion_matrix.csv",
            ("truth \\ prediction", *names),
            ((name, *matrix[k].tolist()) for k, name in enumerate(names)),
        ),
        _plot_confusion(matrix, names, folder / "confusion_matrix.png"),
        _plot_bars(
            values.iou if of_pixels else values.f1,
            names,
            title,
            folder / f"per_class_{'iou' if of_pixels else 'f1'}.png",
        ),
    ]


def _axes(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # not pyplot: it would hold figures for ever and look for a screen
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'lockstep-train[plots]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _plot_confusion(matrix: Tensor, names: Sequence[str], path: Path) -> Path:
    """Rows are true classes, as shares of the row, so that large classes do not hide small ones."""
    shares = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).double().numpy()
    side = 3.5 + 0.45 * min(len(names), _WORDS)
    figure, axes = _axes(side + 0.8, side)
    picture = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the true class")
    if len(names) <= _WORDS:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
    if len(names) <= _NUMBERS:
        for (truth, prediction), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                axes.text(prediction, truth, f"{share:.2f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="prediction", ylabel="truth", title="Confusion matrix")
    return save_whole(path, lambda beside: figure.savefig(beside, dpi=110))


def _plot_bars(values: Tensor, names: Sequence[str], title: str, path: Path) -> Path:
    figure, axes = _axes(6.5, 1.4 + 0.28 * min(len(names), _WORDS))
    bars = axes.barh(range(len(names)), values.nan_to_num().tolist(), color="#3b74b4")
    axes.set(xlim=(0, 1.08), xlabel=title, title=f"{title} by class")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) <= _WORDS:
        axes.set_yticks(range(len(names)), names)
        axes.bar_label(bars, [f"{value:.3f}" for value in values.tolist()], padding=3, fontsize=8)
    return save_whole(path, lambda beside: figure.savefig(beside, dpi=110))


def palette() -> np.ndarray:
    """(256, 3) uint8: a colour for each class, black for the first, grey for what has no label; as Pascal VOC's."""
    number, place = np.arange(256)[:, None], np.arange(8)
    channels = [((number >> (3 * place + channel)) & 1) << (7 - place) for channel in range(3)]
    colours = np.stack([channel.sum(1) for channel in channels], axis=1).astype(np.uint8)
    colours[255] = 160
    return colours


def coloured(mask: np.ndarray) -> Image.Image:
    """A mask as a picture with a palette: its values are the classes, its colours tell them apart."""
    picture = Image.fromarray(mask)
    picture.putpalette(palette().tobytes())
    return picture


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8: the image, tinted by class where it is not background."""
    tint = palette()[mask]
    mixed = (image * (1 - _OVERLAY) + tint * _OVERLAY).astype(np.uint8)
    return np.where((mask == 0)[..., None], image, mixed)


def write_examples(examples: Sequence[tuple[Tensor, Tensor, Tensor]], path: Path) -> Path:
    """Image, true mask and predicted mask side by side, one example a row."""
    rows = []
    for image, truth, prediction in examples:
        pixels = image.permute(1, 2, 0).numpy()
        scale = max(1, round(96 / len(pixels)))
        cells = [pixels, overlay(pixels, truth.numpy()), overlay(pixels, prediction.numpy())]
        padded = [np.pad(cell.repeat(scale, 0).repeat(scale, 1), ((0, _GAP), (0, _GAP), (0, 0))) for cell in cells]
        rows.append(np.concatenate(padded, axis=1))
    return save_whole(path, Image.fromarray(np.concatenate(rows)).save)


def write_mask(mask: Tensor, file: Path | None, name: str, folder: Path) -> Path:
    """The mask in the size of the image it is for, and, where there is such a file, the image tinted by it."""
    values = mask.to(torch.uint8).numpy()
    # a.jpg and a.webp may lie side by side: only .png is not said twice.
    name = name if name.endswith(".png") else f"{name}.png"
    path = folder / "masks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if file is not None:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        values = np.array(Image.fromarray(values).resize(image.size, Image.Resampling.NEAREST))
        above = folder / "overlays" / name
        above.parent.mkdir(parents=True, exist_ok=True)
        save_whole(above, Image.fromarray(overlay(np.array(image), values)).save)
    return save_whole(path, coloured(values).save)
