"""HTML that several sections of the page use."""


def section(name: str, title: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{"".join(parts)}</section>'


def legend(items: list[tuple[str, str]]) -> str:
    """Shapes of 14 by 14 pixels, each with what it stands for."""
    swatch = '<svg width="14" height="14" aria-hidden="true">'
    return f'<ul class="legend">{"".join(f"<li>{swatch}{shape}</svg>{text}</li>" for shape, text in items)}</ul>'


def box(kind: str) -> str:
    return f'<rect class="{kind}" width="14" height="14"/>'
