"""The findings, from findings.toml: how bad each is, why it matters, how to fix it. Judges add what was seen."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .source import Site

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Kind:
    """What can be wrong."""

    name: str
    topic: int
    """Its chapter in docs/audit-findings.md."""
    severity: Severity
    why: str
    fix: str
    """A few lines of code."""
    mode: str = ""
    """The flag of the audit that looks for it; empty: every audit does."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where it was seen."""

    kind: Kind
    what: str
    at: Site | None = None
    evidence: tuple[str, ...] = ()
    own_severity: Severity | None = None
    """If what was seen makes it better or worse than its kind."""

    @property
    def severity(self) -> Severity:
        return self.own_severity or self.kind.severity


_ENTRIES = tomllib.loads(Path(__file__).with_name("findings.toml").read_text())
KINDS = {
    name: Kind(name, e["topic"], e["severity"], e["why"], e["fix"].strip(), e.get("mode", ""))
    for name, e in _ENTRIES.items()
}
CONSEQUENCES: dict[str, list[str]] = {name: entry.get("consequences", []) for name, entry in _ENTRIES.items()}
"""Findings that only follow from another one, by its name."""
DEAD_SETTINGS: dict[str, str] = _ENTRIES["dead-setting"]["variables"]
"""Variables of the environment that people set and nothing reads, with what to use instead."""


def finding(name: str, what: str, at: Site | None = None, *evidence: str, severity: Severity | None = None) -> Finding:
    """Return a finding of the kind called `name`."""
    return Finding(KINDS[name], what, at, evidence, severity)
