"""What a test of `scribble` writes: a table of the classes, and their IoU beside the confusion matrix."""

from pathlib import Path

from torch import Tensor

from ..confusion import class_mean, per_class
from ..report import draw_bars, draw_confusion, figure, plot_side, save_figure, write_table


def write_test(matrix: Tensor, names: tuple[str, ...], folder: Path) -> list[Path]:
    """Write iou.csv and iou.png. The table has an empty IoU for a class that neither occurs nor is predicted."""
    ious = per_class(matrix).iou
    rows = [
        [k, names[k], "" if iou != iou else f"{iou:.6f}", int(row.sum()), int(matrix[:, k].sum()), int(row[k])]
        for k, (iou, row) in enumerate(zip(ious.tolist(), matrix, strict=True))
    ]
    table = write_table(folder / "iou.csv", ["class", "name", "iou", "pixels", "predicted", "both"], rows)
    present = (~ious.isnan()).nonzero().flatten()
    shown = [names[k] for k in present.tolist()]
    side = plot_side(len(shown))
    made, (bars, square) = figure(2.2 * side, side, columns=2)
    draw_bars(bars, ious[present], shown, "IoU")
    bars.set(title=f"mIoU {class_mean(ious):.3f}")
    draw_confusion(made, square, matrix[present][:, present], shown)
    return [table, save_figure(made, folder / "iou.png")]
