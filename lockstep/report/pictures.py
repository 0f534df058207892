"""The pictures of a run as data for a page: small copies, in the order of steps, up to a limit in bytes."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

LIMIT = 6_000_000
"""Bytes of all pictures of a page."""
_WIDEST = 640
_NAME = re.compile(r"step-(\d+)-(.+)\.(?:png|jpe?g|gif)", re.IGNORECASE)


@dataclass
class Picture:
    """One picture of a set."""

    step: int
    title: str
    data: str
    """As a `data:` address."""


def sample_pictures(folder: Path, limit: int = LIMIT) -> tuple[dict[str, list[Picture]], int]:
    """Return the pictures of `samples/` by the name of their set, and how many were left out for the limit.

    Where not all fit, the first and the last of a set are shown, and those between them at equal distances.
    """
    sets: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted((folder / "samples").glob("step-*")):
        if found := _NAME.fullmatch(path.name):
            moving = " (animated)" if path.suffix.lower() == ".gif" else ""
            sets.setdefault(found[2] + moving, []).append((int(found[1]), path))
    each = limit // max(1, len(sets))
    shown = {name: _fitting(files, each) for name, files in sets.items()}
    left_out = sum(map(len, sets.values())) - sum(map(len, shown.values()))
    return {name: pictures for name, pictures in shown.items() if pictures}, left_out


def _fitting(files: list[tuple[int, Path]], limit: int) -> list[Picture]:
    pictures, used = dict[int, Picture](), 0
    for number in _spread(len(files)):
        step, path = files[number]
        try:
            data = small_copy(path)
        except (OSError, ValueError):  # damaged, or written at this moment
            continue
        if used + len(data) > limit:
            break
        used += len(data)
        pictures[number] = Picture(step, path.name, data)
    return [pictures[number] for number in sorted(pictures)]


def _spread(count: int) -> list[int]:
    """Return 0 … count-1 in an order in which any beginning is spread evenly: last, first, middle, quarters."""
    order, gap = dict.fromkeys([count - 1, 0] if count else []), count
    while gap > 1:
        gap = (gap + 1) // 2
        order |= dict.fromkeys(range(0, count, gap))
    return list(order | dict.fromkeys(range(count)))


def small_copy(path: Path) -> str:
    """Return a picture as a `data:` address; wide ones are made smaller, a GIF keeps moving."""
    if path.suffix.lower() == ".gif":
        return f"data:image/gif;base64,{base64.b64encode(path.read_bytes()).decode()}"
    with Image.open(path) as image:
        shown = image.convert("RGB")
        if shown.width > _WIDEST:
            shown = shown.resize(
                (_WIDEST, max(1, round(shown.height * _WIDEST / shown.width))), Image.Resampling.LANCZOS
            )
        buffer = io.BytesIO()
        shown.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
