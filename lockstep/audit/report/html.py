"""The verdict as one HTML page that needs no other file, for any browser."""

import re
import shlex
from html import escape
from pathlib import Path
from textwrap import dedent

from ..catalog import Finding
from ..model import Rank
from ..probes.collectives import ALL as COLLECTIVES
from ..source import Site
from ..verdict import Verdict, counted
from .ledger import ledger
from .parts import section
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
        _findings(verdict.findings),
        timeline(verdict.trace),
        ledger(verdict.trace),
        _notes(verdict.notes),
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
def _findings(findings: list[Finding]) -> str:
    if not findings:
        return ""
    return section("findings", "Findings", *map(_finding, findings))


def _finding(finding: Finding) -> str:
    line = f'<span class="line">{escape(f"{finding.at.file}:{finding.at.line}")}</span>' if finding.at else ""
    evidence = "".join(f"<li>{escape(seen)}</li>" for seen in finding.evidence)
    return (
        f'<article class="finding {finding.severity}"><header><span class="severity">{finding.severity}</span>'
        f"<h3>{escape(finding.kind.name)}</h3>{line}</header>"
        f'<p class="what">{escape(_capital(finding.what))}</p>'
        + (f'<ul class="evidence">{evidence}</ul>' if evidence else "")
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
    try:
        source = Path(at.file).read_text(errors="replace").split("\n")
    except OSError:
        return ""
    first = max(1, at.line - _AROUND)
    lines = dedent("\n".join(source[first - 1 : at.line + _AROUND]).expandtabs(4)).rstrip("\n").split("\n")
    if not 1 <= at.line <= len(source):
        return ""
    rows = "".join(_code_row(number, line, number == at.line) for number, line in enumerate(lines, first))
    return f'<pre tabindex="0"><code>{rows}</code></pre>'


def _code_row(number: int, line: str, marked: bool) -> str:
    kind = "row marked" if marked else "row"
    return f'<span class="{kind}"><span class="number">{number}</span>{escape(line)}\n</span>'


# -- notes and output -------------------------------------------------------------------------------------------------
def _notes(notes: list[str]) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(_capital(note))}</li>" for note in notes)
    return section("notes", "Notes", f'<ul class="list lede">{lines}</ul>')


def _printed(ranks: list[Rank]) -> str:
    parts = "".join(_output(rank.number, rank.printed) for rank in ranks if rank.printed.strip())
    parts = parts or '<p class="muted">The ranks printed nothing.</p>'
    return section("printed", "Printed last", f"<div>{parts}</div>")


def _output(rank: int, text: str) -> str:
    lines = _lines(text)
    extent = counted(len(lines), "line") if len(lines) <= _LAST else f"last {_LAST} of {len(lines)} lines"
    last = escape("\n".join(lines[-_LAST:]))
    return (
        f'<details><summary>Rank {rank} <span class="muted">{extent}</span></summary>'
        f'<pre class="plain wraps" tabindex="0"><code>{last}</code></pre></details>'
    )


def _lines(text: str) -> list[str]:
    """The lines of an output without terminal colours; of a progress bar, its last state."""
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ESCAPES.sub("", text).strip().split("\n")]
