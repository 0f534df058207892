"""The verdict as one HTML page that needs no other file, for any browser."""

import re
import shlex
from html import escape
from pathlib import Path
from textwrap import dedent

from ..catalog import Finding
from ..model import Rank
from ..probes.collectives import ALL as COLLECTIVES
from ..source import Site, source_lines
from ..verdict import Verdict, counted
from .ledger import ledger
from .parts import lines, muted, section
from .timeline import timeline

STYLE = Path(__file__).with_name("style.css").read_text()
_AROUND = 3
"""Lines of code shown before and after the one that a finding is about."""
_LAST = 60
"""Lines shown of what a rank printed."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def as_html(verdict: Verdict) -> str:
    """The page."""
    title = escape(f"lockstep audit: {shlex.join(verdict.script)}")
    parts = (
        _verdict(verdict),
        section("findings", "Findings", *map(_finding, verdict.findings)) if verdict.findings else "",
        timeline(verdict.trace),
        ledger(verdict.trace),
        section("notes", "Notes", lines("list lede", map(_capital, verdict.notes))) if verdict.notes else "",
        _printed(verdict.trace.ranks),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _verdict(verdict: Verdict) -> str:
    tone = verdict.findings[0].severity if verdict.findings else "clean"
    return (
        f'<header class="verdict {tone}"><p class="script"><code>{escape(shlex.join(verdict.script))}</code></p>'
        f"<h1>{escape(verdict.sentence)}</h1></header>"
    )


# -- findings ---------------------------------------------------------------------------------------------------------
def _finding(finding: Finding) -> str:
    line = f'<span class="line">{escape(f"{finding.at.file}:{finding.at.line}")}</span>' if finding.at else ""
    return (
        f'<article class="finding {finding.severity}"><header><span class="severity">{finding.severity}</span>'
        f"<h3>{escape(finding.kind.name)}</h3>{line}</header>"
        f'<p class="what">{escape(_capital(finding.what))}</p>'
        + (lines("evidence", finding.evidence) if finding.evidence else "")
        + (_excerpt(finding.at) if finding.at else "")
        + f'<h4>Why it matters</h4><p class="what">{escape(finding.kind.why)}</p><h4>How to fix it</h4>'
        f'<pre class="plain" tabindex="0"><code>{escape(finding.kind.fix)}</code></pre></article>'
    )


def _capital(text: str) -> str:
    """The text as a sentence; the name of a function keeps its case."""
    first = text[:1] if text.split(" ", 1)[0] in COLLECTIVES else text[:1].upper()
    return first + text[1:] + ("" if text.endswith((".", "…")) else ".")


def _excerpt(at: Site) -> str:
    """The code around a line, that line marked; nothing if it cannot be read."""
    source = source_lines(at.file)
    first = max(1, at.line - _AROUND)
    code = dedent("\n".join(source[first - 1 : at.line + _AROUND]).expandtabs(4)).rstrip("\n").split("\n")
    if not 1 <= at.line <= len(source):
        return ""
    rows = ""
    for number, line in enumerate(code, first):
        kind = "row marked" if number == at.line else "row"
        rows += f'<span class="{kind}"><span class="number">{number}</span>{escape(line)}\n</span>'
    return f'<pre tabindex="0"><code>{rows}</code></pre>'


# -- notes and output -------------------------------------------------------------------------------------------------
def _printed(ranks: list[Rank]) -> str:
    parts = "".join(_output(rank.number, rank.printed) for rank in ranks if rank.printed.strip())
    return section("printed", "Printed last", f"<div>{parts or muted('The ranks printed nothing.')}</div>")


def _output(rank: int, text: str) -> str:
    """The last lines of an output without terminal colours; of a progress bar, its last state."""
    printed = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ESCAPES.sub("", text).strip().split("\n")]
    extent = counted(len(printed), "line") if len(printed) <= _LAST else f"last {_LAST} of {len(printed)} lines"
    last = escape("\n".join(printed[-_LAST:]))
    return (
        f'<details><summary>Rank {rank} <span class="muted">{extent}</span></summary>'
        f'<pre class="plain wraps" tabindex="0"><code>{last}</code></pre></details>'
    )
