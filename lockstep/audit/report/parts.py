"""HTML that several sections of the page use."""

from collections.abc import Iterable
from html import escape


def section(name: str, title: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{"".join(parts)}</section>'


def muted(text: str, kind: str = "muted") -> str:
    return f'<p class="{kind}">{text}</p>'


def lines(kind: str, texts: Iterable[str]) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def chart(names: Iterable[str], style: str, picture: str) -> str:
    """A picture of rows with the names of the rows beside it."""
    column = "".join(f'<div style="{style}">{name}</div>' for name in names)
    return f'<div class="chart"><div class="names">{column}</div>{picture}</div>'


def legend(items: list[tuple[str, str]]) -> str:
    """Shapes of 14 by 14 pixels, each with what it stands for."""
    swatch = '<svg width="14" height="14" aria-hidden="true">'
    return f'<ul class="legend">{"".join(f"<li>{swatch}{shape}</svg>{text}</li>" for shape, text in items)}</ul>'


def box(kind: str) -> str:
    return f'<rect class="{kind}" width="14" height="14"/>'
