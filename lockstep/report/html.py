"""The page itself: one file that needs no other, for any browser, light and dark. The template is page.html."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import replacing
from ..plots import NOT_DRAWN, panels
from ..watch.times import COMMUNICATION, COMPUTATION, DATA, UPDATE
from .facts import RunFacts, differing_settings, duration
from .pictures import sample_pictures

_KINDS = (
    COMPUTATION,
    DATA,
    COMMUNICATION,
    UPDATE,
    "evaluation",
    "sampling",
    "saving",
    "logging",
    "start-up",
    "closing",
)
"""In the order of the bars."""
_MOST_POINTS = 2000
"""Of a line; more are thinned out."""


def write_page(folders: Sequence[Path], path: Path, same: Callable[[str], bool] = lambda _: True) -> None:
    """Write the page of some runs. `same(name)`: whether training and validation log the same quantity under a name."""
    page = render([RunFacts.read(folder) for folder in folders], same)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")


def render(runs: list[RunFacts], same: Callable[[str], bool]) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # where it is needed: once in a run, at its end

    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters["duration"] = duration
    kinds = [kind for kind in _KINDS if any(rank.get(kind, 0.0) > 0 for run in runs for rank in run.times)]
    pictures = [sample_pictures(run.folder) for run in runs]
    # In JSON within a page, `</` would end the script element.
    data = json.dumps(charts(runs, same), allow_nan=False).replace("</", "<\\/")
    return pages.get_template("page.html").render(
        runs=runs, kinds=kinds, bars=[_bars(run, kinds) for run in runs], pictures=pictures, data=data,
        differing=differing_settings(runs) if len(runs) > 1 else [],
    )  # fmt: skip


def charts(runs: list[RunFacts], same: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the charts: each has a title and lines, and a line a label, the number of its run, and points."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if name not in NOT_DRAWN))
    shown = []
    for title, lines in panels(names, same).items():
        drawn: list[dict[str, Any]] = [
            {"label": _label(label, run, runs), "run": number, "validation": name.startswith("val/"), "points": points}
            for label, name in lines.items()
            for number, run in enumerate(runs)
            if (points := _points(run.metrics.get(name, {})))
        ]
        if any(len(line["points"]) > 1 for line in drawn):
            shown.append({"title": title, "lines": drawn})
    return shown


def _label(label: str, run: RunFacts, runs: list[RunFacts]) -> str:
    if len(runs) == 1:
        return label
    return f"{run.name}, validation" if label == "validation" else run.name


def _points(series: dict[int, float | None]) -> list[tuple[int, float]]:
    points = [(step, value) for step, value in sorted(series.items()) if value is not None]
    stride = -(-len(points) // _MOST_POINTS)
    return points[:: max(1, stride)]


def _bars(run: RunFacts, kinds: list[str]) -> list[dict[str, Any]]:
    """Return, for each rank, how its time divides into kinds of work, in per cent of the longest rank's."""
    longest = max((sum(rank.values()) for rank in run.times), default=0.0)
    return [
        {
            "rank": number,
            "parts": [(kind, rank[kind], 100 * rank[kind] / longest) for kind in kinds if rank.get(kind, 0.0) > 0],
            "total": sum(rank.values()),
        }
        for number, rank in enumerate(run.times)
    ]
