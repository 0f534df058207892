"""The report of an audit for people: one page that holds all it needs, to be read in any browser or sent to others."""

import re
import shlex
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from .catalog import Finding
from .html_ledger import ledger
from .html_parts import counted, section
from .html_style import STYLE
from .html_timeline import timeline
from .probes.collectives import ALL as COLLECTIVES
from .trace import Rank, Site, Trace

if TYPE_CHECKING:
    from .command import Verdict

_AROUND = 3
"""Lines of code shown before and after the one that a finding is about."""
_LAST = 60
"""Lines shown of what a rank printed."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def as_html(verdict: "Verdict") -> str:
    """The page."""
    title = escape(f"lockstep audit: {shlex.join(verdict.words)}")
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


# -- verdict ----------------------------------------------------------------------------------------------------------
def _verdict(verdict: "Verdict") -> str:
    tone = verdict.findings[0].severity if verdict.findings else "clean"
    facts = "".join(f"<li>{fact}</li>" for fact in _facts(verdict))
    return (
        f'<header class="verdict {tone}"><p class="script"><code>{escape(shlex.join(verdict.words))}</code></p>'
        f'<h1>{escape(_sentence(verdict))}</h1><ul class="facts">{facts}</ul></header>'
    )


def _sentence(verdict: "Verdict") -> str:
    """The verdict in one sentence."""
    if not verdict.findings:
        return f"Nothing found{_good(verdict.trace)}."
    counts = ((sum(f.severity == s for f in verdict.findings), s) for s in ("error", "warning", "note"))
    found = ", ".join(counted(n, s) for n, s in counts if n)
    return f"{found}{_ending(verdict)}."


def _good(trace: Trace) -> str:
    """What holds if nothing is wrong; of data that came without a loader nothing is known."""
    if trace.world == 1:
        return ""
    loads = any(rank.first("batch") for rank in trace.ranks)
    return f": the ranks train one model{' on all of the data' if loads else ''}"


def _ending(verdict: "Verdict") -> str:
    if verdict.trace.hung:
        return "; the ranks hang"
    if any(rank.failed for rank in verdict.trace.ranks):
        return "; the script failed" + ("" if _steps(verdict)[1] else " before its first step")
    return ""


def _steps(verdict: "Verdict") -> tuple[int, int]:
    """The fewest and the most that a rank took."""
    counts = [len(rank.steps) for rank in verdict.trace.ranks]
    return min(counts, default=0), max(counts, default=0)


def _facts(verdict: "Verdict") -> list[str]:
    least, most = _steps(verdict)
    steps = counted(most, "optimizer step") if least == most else f"{least} to {most} optimizer steps"
    return [counted(verdict.trace.world, "rank"), steps]


# -- findings ---------------------------------------------------------------------------------------------------------
def _findings(findings: list[Finding]) -> str:
    if not findings:
        return ""
    return section("findings", "Findings", *map(_finding, findings))


def _finding(finding: Finding) -> str:
    place = f'<span class="place">{escape(f"{finding.at.file}:{finding.at.line}")}</span>' if finding.at else ""
    evidence = "".join(f"<li>{escape(seen)}</li>" for seen in finding.evidence)
    return (
        f'<article class="finding {finding.severity}"><header><span class="severity">{finding.severity}</span>'
        f"<h3>{escape(finding.kind.name)}</h3>{place}</header>"
        f'<p class="what">{escape(_capital(finding.what))}</p>'
        + (f'<ul class="evidence">{evidence}</ul>' if evidence else "")
        + (_excerpt(finding.at) if finding.at else "")
        + f'<h4>Why it matters</h4><p class="what">{escape(finding.kind.why)}</p><h4>How to mend it</h4>'
        f'<pre class="plain" tabindex="0"><code>{escape(finding.kind.mend)}</code></pre></article>'
    )


def _capital(text: str) -> str:
    """A sentence of it; the name of a function keeps its case."""
    begins = text[:1] if text.split(" ", 1)[0] in COLLECTIVES else text[:1].upper()
    return begins + text[1:] + ("" if text.endswith((".", "…")) else ".")


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
    """Of an output, without terminal colours; of a line that was written over, what was left of it."""
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ESCAPES.sub("", text).strip().split("\n")]
