"""The verdict on the terminal, and as JSON for programs."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

from ..catalog import Finding
from ..source import source_lines
from ..verdict import Verdict

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(verdict: Verdict, console: Console | None = None) -> None:
    """Print each finding with its line, what was seen, why it matters and how to fix it; then the verdict."""
    console = console or Console(highlight=False)
    for finding in verdict.findings:
        _show_finding(finding, console)
    if verdict.trace.hung or any(f.kind.name == "crashed" for f in verdict.findings):
        _show_endings(verdict, console)
    for note in verdict.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True)
    for ignored in verdict.ignored:
        finding, at = ignored.finding, f" at {ignored.finding.at}" if ignored.finding.at else ""
        console.print(
            f"[dim]ignored by {escape(ignored.by.origin)}: {finding.kind.name}{escape(at)}[/]", soft_wrap=True
        )
    console.print(f"[bold]{escape(verdict.sentence)}[/]", soft_wrap=True)
    if verdict.consequence:
        console.print(escape(verdict.consequence), soft_wrap=True)


def _show_finding(finding: Finding, console: Console) -> None:
    severity, at = f"[{_COLOURS[finding.severity]}]{finding.severity}[/]", finding.at
    line = f"  {at.file}:{at.line}" if at else ""
    console.print(f"{severity} [bold]{escape(finding.kind.name)}[/]{escape(line)}", soft_wrap=True)
    code = source_lines(at.file)[at.line - 1 : at.line] if at else []
    if any(code):
        console.print(f"    [dim]> {escape(code[0].strip())}[/]", soft_wrap=True)
    console.print(Padding(escape(finding.what), (0, 4)))
    for seen in finding.evidence:
        console.print(Padding(f"[dim]{escape(seen)}[/]", (0, 4)))
    console.print(Padding(f"Why: {escape(finding.kind.why)}", (0, 4)))
    console.print(Padding("Fix:", (0, 4)))
    console.print(Padding(Syntax(finding.kind.fix, "python", background_color="default", word_wrap=True), (0, 8)))
    console.print()


def _show_endings(verdict: Verdict, console: Console) -> None:
    """What each rank was doing at the end, and the last lines that one of them printed."""
    for rank in verdict.trace.ranks:
        console.print(escape(rank.ending), soft_wrap=True)
    ranks = sorted(verdict.trace.ranks, key=lambda rank: not rank.failed)
    printed = next((rank.printed for rank in ranks if rank.printed.strip()), "")
    lines = [line for line in printed.strip().splitlines() if not line.startswith("frame #")]  # of libtorch
    console.print(Padding(escape("\n".join(lines[-12:])), (0, 4)))


def as_json(verdict: Verdict) -> str:
    ranks = verdict.trace.ranks
    report = {
        "script": verdict.script,
        "verdict": verdict.sentence,
        "status": verdict.status,
        "fail_on": verdict.fail_on,
        "findings": [_as_dict(finding) for finding in verdict.findings],
        "ignored": [_as_dict(one.finding) | {"ignored_by": one.by.origin} for one in verdict.ignored],
        "ranks": [{"rank": r.number, "steps": len(r.steps), "status": r.status, "end": r.outcome} for r in ranks],
        "notes": verdict.notes,
        "blind": verdict.trace.failed_probes,
    }
    return json.dumps(report, indent=2)


def _as_dict(finding: Finding) -> dict[str, Any]:
    """Name, topic, severity, why and fix from its kind; the rest from what was seen."""
    file, line = finding.at or (None, None)
    about = {**asdict(finding.kind), "severity": finding.severity}
    return {**about, "what": finding.what, "evidence": finding.evidence, "file": file, "line": line}
