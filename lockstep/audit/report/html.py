"""The verdict as one HTML page that needs no other file, for any browser. The template is page.html."""

import re
import shlex
from pathlib import Path
from textwrap import dedent

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..probes.collectives import ALL as COLLECTIVES
from ..source import Site, source_lines
from ..verdict import Verdict, counted
from .ledger import ledger, outline
from .timeline import duration, timeline

_AROUND = 3
"""Lines of code shown before and after the one that a finding is about."""
_LAST = 60
"""Lines shown of what a rank printed."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def as_html(verdict: Verdict) -> str:
    """The page."""
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters.update(sentence=_sentence, excerpt=_excerpt, printed=_printed, duration=duration, outline=outline)
    trace, script = verdict.trace, shlex.join(verdict.script)
    page = pages.get_template("page.html")
    return page.render(verdict=verdict, script=script, timeline=timeline(trace), figures=ledger(trace))


def _sentence(text: str) -> str:
    """The text with a capital and a full stop; the name of a function keeps its case."""
    first = text[:1] if text.split(" ", 1)[0] in COLLECTIVES else text[:1].upper()
    return first + text[1:] + ("" if text.endswith((".", "…")) else ".")


def _excerpt(at: Site | None) -> list[tuple[int, str]]:
    """The lines of code around one, with their numbers; none if it cannot be read."""
    source = source_lines(at.file) if at else []
    if at is None or not 1 <= at.line <= len(source):
        return []
    first = max(1, at.line - _AROUND)
    code = dedent("\n".join(source[first - 1 : at.line + _AROUND]).expandtabs(4)).rstrip("\n").split("\n")
    return list(enumerate(code, first))


def _printed(text: str) -> tuple[str, str]:
    """How much was printed, and its last lines without terminal colours; of a progress bar, its last state."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ESCAPES.sub("", text).strip().split("\n")]
    extent = counted(len(lines), "line") if len(lines) <= _LAST else f"last {_LAST} of {len(lines)} lines"
    return extent, "\n".join(lines[-_LAST:])
