"""The plan as a picture: samples per second by number of GPUs, and the memory of one GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure  # not pyplot: no window system is asked for

from ..files import replacing
from .hardware import GIB
from .memory import Memory
from .scaling import Scaled

PARTS = ("weights", "gradients", "optimizer", "averages", "activations")
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677")


def draw(title: str, runs: Sequence[Scaled], memory: Mapping[str, Memory], capacity: float, path: Path) -> None:
    """Write the picture; `memory` by what the GPUs share, `capacity` is that of one GPU."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    worlds = [run.machines.world for run in runs]
    left.plot(worlds, worlds, linestyle="--", color="#999999", linewidth=1, label="ideal")
    left.plot(worlds, [run.speed_up for run in runs], marker="o", color=COLOURS[0], label="predicted")
    for run in runs:
        place = (run.machines.world, run.speed_up)
        left.annotate(f"{run.samples_per_second:,.0f}/s", place, (6, -12), textcoords="offset points", fontsize=8)
    left.set(xlabel="GPUs", ylabel="speed-up (samples per second)", xticks=worlds, ylim=(0, None))
    left.margins(x=0.2)
    left.legend(loc="upper left")
    names = [{"none": "DDP", "optimizer": "optimizer\nshared", "full": "all\nshared"}[shard] for shard in memory]
    base = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        sizes = [getattr(of, part) / GIB for of in memory.values()]
        right.bar(names, sizes, bottom=base, color=colour, label=part, width=0.6)
        base = [below + size for below, size in zip(base, sizes, strict=True)]
    right.axhline(capacity / GIB, color="black", linestyle="--", linewidth=1)
    right.annotate(f"{capacity / GIB:.0f} GiB", (1.0, capacity / GIB), (-2, 3), xycoords=("axes fraction", "data"),
                   textcoords="offset points", fontsize=8, ha="right")  # fmt: skip
    right.set(ylabel=f"GiB of each of {worlds[-1]} GPUs", ylim=(0, 1.15 * max(capacity / GIB, *base)))
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
