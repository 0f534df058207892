"""The verdict in SARIF 2.1.0, which GitHub, GitLab and editors show at the lines of a pull request."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ... import __version__
from ..catalog import Finding, Kind
from ..ignores import Ignored
from ..source import Site, source_lines
from ..verdict import Verdict

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT = "%SRCROOT%"


def as_sarif(verdict: Verdict) -> str:
    """Return one run: a rule for each kind of finding, a result for each finding; those ignored are suppressed."""
    found = [*verdict.findings, *(one.finding for one in verdict.ignored)]
    kinds = list(dict.fromkeys(finding.kind for finding in found))
    results = [_result(finding, kinds, verdict.script) for finding in verdict.findings]
    results += [_result(one.finding, kinds, verdict.script) | _suppressed(one) for one in verdict.ignored]
    driver = {"name": "lockstep audit", "semanticVersion": __version__, "rules": [_rule(kind) for kind in kinds]}
    invocation = {
        "commandLine": f"lockstep audit -- {shlex.join(verdict.script)}",
        "executionSuccessful": True,  # of the audit, whatever it found
        "exitCode": verdict.status,
        "toolExecutionNotifications": [{"level": "note", "message": {"text": note}} for note in verdict.notes],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "originalUriBaseIds": {_ROOT: {"uri": f"{Path.cwd().as_uri()}/"}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(kind: Kind) -> dict[str, Any]:
    return {
        "id": kind.name,
        "name": "".join(word.capitalize() for word in kind.name.split("-")),
        "shortDescription": {"text": kind.name.replace("-", " ")},
        "fullDescription": {"text": kind.why},
        "help": {"text": f"{kind.why}\n\n{kind.fix}", "markdown": f"{kind.why}\n\n```python\n{kind.fix}\n```"},
        "defaultConfiguration": {"level": kind.severity},
    }


def _result(finding: Finding, kinds: list[Kind], script: list[str]) -> dict[str, Any]:
    what = finding.what[:1].upper() + finding.what[1:]
    text = "\n".join([f"{what.rstrip('.')}.", *finding.evidence, f"Why: {finding.kind.why}"])
    at = finding.at or _first_line(script)
    line = "".join(source_lines(at.file)[at.line - 1 : at.line]).strip() if at else ""
    print_of = hashlib.sha256(f"{finding.kind.name}\n{line}".encode()).hexdigest()
    return {
        "ruleId": finding.kind.name,
        "ruleIndex": kinds.index(finding.kind),
        "level": finding.severity,
        "message": {"text": text},
        "locations": [_location(at)] if at else [],
        "partialFingerprints": {"lockstepAudit/v1": print_of},
    }


def _first_line(script: list[str]) -> Site | None:
    """Where a finding without a line is shown: viewers leave out results that have no place."""
    return Site(script[0], 1) if Path(script[0]).is_file() else None


def _location(at: Site) -> dict[str, Any]:
    """A line, relative to the current folder if the file is in it."""
    file = Path(at.file).resolve()
    artifact = {"uri": file.as_uri()}
    if file.is_relative_to(Path.cwd()):
        artifact = {"uri": quote(file.relative_to(Path.cwd()).as_posix()), "uriBaseId": _ROOT}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": max(at.line, 1)}}}


def _suppressed(one: Ignored) -> dict[str, Any]:
    kind = "inSource" if one.by.lines is not None else "external"
    return {"suppressions": [{"kind": kind, "justification": f"ignored by {one.by.origin}"}]}
