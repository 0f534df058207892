"""The findings, from findings.toml: how bad each is, why it matters, how to fix it. Judges add what was seen."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .source import Site

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Kind:
    """What can be wrong."""

    name: str
    topic: int
    """Its chapter in docs/audit.md."""
    severity: Severity
    why: str
    fix: str
    """A few lines of code."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where it was seen."""

    kind: Kind
    what: str
    at: Site | None = None
    evidence: tuple[str, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        return self.kind.severity


KINDS = {
    name: Kind(name, entry["topic"], entry["severity"], entry["why"], entry["fix"].strip())
    for name, entry in tomllib.loads(Path(__file__).with_name("findings.toml").read_text()).items()
}


def finding(name: str, what: str, at: Site | None = None, *evidence: str) -> Finding:
    return Finding(KINDS[name], what, at, evidence)
