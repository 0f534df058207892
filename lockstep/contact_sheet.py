"""Pictures side by side, each with a few words below it."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from .files import replacing

_SIDE = 160
"""Pixels of the longer side of a picture on the sheet."""
_GAP, _LINE, _COLUMNS = 10, 13, 5


def save_sheet(pictures: Sequence[tuple[Tensor, list[str]]], path: Path) -> None:
    """Write images (3, H, W) uint8 and the lines below each of them as a PNG."""
    columns, lines = min(_COLUMNS, len(pictures)), max(len(text) for _, text in pictures)
    across, down = _SIDE + _GAP, _SIDE + lines * _LINE + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, -(-len(pictures) // columns) * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (picture, text) in enumerate(pictures):
        left, top = _GAP + i % columns * across, _GAP + i // columns * down
        sheet.paste(_scaled(picture), (left, top))
        draw.multiline_text((left, top + _SIDE + 2), "\n".join(map(_short, text)), fill="black", spacing=2)
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _scaled(picture: Tensor) -> Image.Image:
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().cpu().numpy())
    ratio = _SIDE / max(image.size)
    size = max(1, round(ratio * image.width)), max(1, round(ratio * image.height))
    return image.resize(size, Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.BOX)


def _short(text: str) -> str:
    return text if len(text) <= 26 else text[:25] + "…"
