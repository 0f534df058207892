"""What an audit found, for the terminal, for programs and for a browser."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

from .catalog import Finding
from .html import as_html
from .judge.collectives import doing

if TYPE_CHECKING:
    from .command import Verdict

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
__all__ = ["as_html", "as_json", "headline", "show"]


def headline(verdict: "Verdict") -> str:
    """The verdict in one line."""
    counts = {s: sum(f.severity == s for f in verdict.findings) for s in ("error", "warning", "note")}
    steps = min((len(r.steps) for r in verdict.trace.ranks), default=0)
    watched = f"{verdict.trace.world} ranks, {steps} steps"
    if not verdict.findings and (blind := len(verdict.trace.blind)):
        return f"nothing found, but {blind} probe{'s' * (blind > 1)} failed, see the notes ({watched})"
    if not verdict.findings and steps == 0:
        return f"nothing found, but no step was watched ({watched})"
    if not verdict.findings:
        whole = any(r.of("pass_end") for r in verdict.trace.ranks)
        return f"nothing found: the ranks train one model{' on all of the data' * whole} ({watched})"
    parts = [f"{n} {s}{'s' * (n > 1)}" for s, n in counts.items() if n]
    return f"{', '.join(parts)} ({watched})"


def show(verdict: "Verdict", console: Console | None = None) -> None:
    """To the terminal: each finding with its place, what was seen, why it matters and how to mend it."""
    console = console or Console(highlight=False)
    for finding in verdict.findings:
        colour = _COLOURS[finding.severity]
        place = f"  {finding.at.file}:{finding.at.line}" if finding.at else ""
        console.print(
            f"[{colour}]{finding.severity}[/] [bold]{escape(finding.kind.name)}[/]{escape(place)}", soft_wrap=True
        )
        line = _source_line(finding)
        if line:
            console.print(f"    [dim]> {escape(line)}[/]", soft_wrap=True)
        console.print(Padding(escape(finding.what), (0, 4)))
        for seen in finding.evidence:
            console.print(Padding(f"[dim]{escape(seen)}[/]", (0, 4)))
        console.print(Padding(f"Why: {escape(finding.kind.why)}", (0, 4)))
        console.print(Padding("Mend:", (0, 4)))
        console.print(Padding(Syntax(finding.kind.mend, "python", background_color="default", word_wrap=True), (0, 8)))
        console.print()
    if verdict.trace.hung or any(f.kind.name == "crashed" for f in verdict.findings):
        for rank in verdict.trace.ranks:
            console.print(f"rank {rank.number} {escape(doing(rank))}", soft_wrap=True)
        ranks = sorted(verdict.trace.ranks, key=lambda rank: not rank.failed)
        last = next((rank.printed for rank in ranks if rank.printed.strip()), "")
        lines = [line for line in last.strip().splitlines() if not line.startswith("frame #")]  # of libtorch
        console.print(Padding(escape("\n".join(lines[-12:])), (0, 4)))
    for note in verdict.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True)
    console.print(f"[bold]{escape(headline(verdict))}[/]", soft_wrap=True)


def _source_line(finding: Finding) -> str:
    if finding.at is None:
        return ""
    try:
        return Path(finding.at.file).read_text().splitlines()[finding.at.line - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def as_json(verdict: "Verdict") -> str:
    findings = [
        {
            "name": f.kind.name,
            "topic": f.kind.topic,
            "severity": f.severity,
            "what": f.what,
            "evidence": list(f.evidence),
            "file": f.at.file if f.at else None,
            "line": f.at.line if f.at else None,
            "why": f.kind.why,
            "mend": f.kind.mend,
        }
        for f in verdict.findings
    ]
    ranks = [
        {"rank": r.number, "steps": len(r.steps), "status": r.status, "end": doing(r)} for r in verdict.trace.ranks
    ]
    return json.dumps(
        {
            "script": verdict.words,
            "verdict": headline(verdict),
            "status": verdict.status,
            "findings": findings,
            "ranks": ranks,
            "notes": verdict.notes,
            "blind": verdict.trace.blind,
        },
        indent=2,
    )
