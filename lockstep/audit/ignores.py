"""Findings that the user wants to pass: by --ignore, in pyproject.toml, or by a comment on the line.

A comment `# lockstep: ignore[local-batch-norm]` stands on the line of the finding, anywhere in its statement, or on a
line of its own before it. An ignore that hides nothing is reported, so that it does not hide something new later.
"""

import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..nearest import nearest
from .catalog import KINDS, Finding
from .source import Site, parsed

_COMMENT = re.compile(r"#\s*lockstep:\s*ignore(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class Ignore:
    """A finding to pass, everywhere or at the lines of one statement."""

    name: str
    origin: str
    """Where it is written: "--ignore", "pyproject.toml", "train.py:12"."""
    file: str | None = None
    lines: range | None = None

    def covers(self, finding: Finding) -> bool:
        if finding.kind.name != self.name or self.lines is None:
            return finding.kind.name == self.name
        return finding.at is not None and finding.at.file == self.file and finding.at.line in self.lines

    def __str__(self) -> str:
        return f"{self.origin} ({self.name})"


@dataclass(frozen=True)
class Ignored:
    """A finding that is not judged, and what hides it."""

    finding: Finding
    by: Ignore


@dataclass(frozen=True)
class Sifted:
    """The findings that count, those that are ignored, and the ignores that hid nothing."""

    findings: list[Finding]
    ignored: list[Ignored]
    idle: list[Ignore]


def sift(findings: list[Finding], ignores: list[Ignore]) -> Sifted:
    """Return the findings without those that some ignore covers."""
    hidden = {id(f): next((i for i in ignores if i.covers(f)), None) for f in findings}
    ignored = [Ignored(f, by) for f in findings if (by := hidden[id(f)])]
    idle = [i for i in ignores if not any(i.covers(f) for f in findings)]
    return Sifted([f for f in findings if hidden[id(f)] is None], ignored, idle)


def by_name(names: Sequence[str], origin: str) -> list[Ignore]:
    """Return ignores that hold everywhere; ValueError for a name that no finding has."""
    for name in names:
        if name not in KINDS:
            raise ValueError(f"{origin}: there is no finding {name!r}{nearest(name, KINDS)}")
    return [Ignore(name, origin) for name in names]


def by_comments(file: str) -> tuple[list[Ignore], list[str]]:
    """Return the ignores in the comments of a file, and what is wrong with other such comments."""
    found, wrong = list[Ignore](), list[str]()
    for line, alone, names in _comments(file):
        where = str(Site(file, line))
        if not names:
            wrong.append(f"{where}: say what is ignored: # lockstep: ignore[NAME]")
        for name in names:
            if name not in KINDS:
                wrong.append(f"{where}: there is no finding {name!r}{nearest(name, KINDS)}")
            else:
                found.append(Ignore(name, where, file, _statement(file, line, alone)))
    return found, wrong


def _comments(file: str) -> Iterator[tuple[int, bool, list[str]]]:
    """The line of each comment that ignores something, whether the line has nothing else, and the names."""
    with suppress(OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError), Path(file).open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
                names = [name.strip() for name in (match[1] or "").split(",")]
                yield token.start[0], not token.line[: token.start[1]].strip(), [n for n in names if n]


def _statement(file: str, line: int, alone: bool) -> range:
    """The lines of the statement that a comment stands in or, on a line of its own, before."""
    tree = parsed(file)
    spans = [_span(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)] if tree else []
    around = [span for span in spans if line in span]
    if around and not (alone and line not in min(around, key=len)):
        return min(around, key=len)
    return min(
        (span for span in spans if span.start > line), key=lambda s: (s.start, len(s)), default=range(line, line)
    )


def _span(node: ast.stmt) -> range:
    """The lines of a statement; of one with a body, those before the body."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    first = body[0] if body else None
    if first is not None:
        start = getattr(first, "lineno", None) or first.pattern.lineno
        decorators = [d.lineno for d in getattr(node, "decorator_list", [])]
        return range(min([node.lineno, *decorators]), max(start, node.lineno + 1))
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
