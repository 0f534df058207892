"""docs/audit.md says what the audit does: every finding, every flag, code that is Python."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.audit.catalog import KINDS
from lockstep.options import Audit

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("audit.md", "audit-findings.md")}
USE, FINDINGS = PAGES.values()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)]+)\)").findall
SNIPPETS = [code for page in PAGES.values() for language, code in FENCE.findall(page) if language == "python"]


def chapters() -> dict[str, tuple[int, str, str]]:
    """Topic, severity and text under the heading of each finding."""
    found = {}
    for chapter in re.split(r"^## ", FINDINGS, flags=re.M):
        topic = re.match(r"(\d+)\. ", chapter)
        for part in re.split(r"^### ", chapter, flags=re.M)[1:] if topic else []:
            heading = re.match(r"(\S+) \((\w+)\)\n", part)
            assert topic and heading, f"a heading is `### name (severity)`, not {part.splitlines()[0]!r}"
            assert heading[1] not in found, f"{heading[1]} has two headings"
            found[heading[1]] = int(topic[1]), heading[2], part
    return found


def test_every_finding_has_its_heading_in_its_chapter_with_its_severity() -> None:
    said = {name: (topic, severity) for name, (topic, severity, _) in chapters().items()}
    assert said == {kind.name: (kind.topic, kind.severity) for kind in KINDS.values()}


@pytest.mark.parametrize("name", KINDS)
def test_every_finding_shows_what_is_wrong_and_what_is_right(name: str) -> None:
    _, _, text = chapters()[name]
    code = "".join(code for language, code in FENCE.findall(text) if language == "python")
    assert re.search(r"^# wrong\b", code, re.M) and re.search(r"^# right\b", code, re.M)


def test_the_table_names_every_finding_under_its_topic() -> None:
    rows = re.findall(r"^\| \[(\d+)\]\(#\d+-[\w-]+\) \| (.+) \|$", FINDINGS, re.M)
    table = {name: int(topic) for topic, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert table == {kind.name: kind.topic for kind in KINDS.values()}


def test_links_lead_to_headings() -> None:
    anchors = set()
    for name, page in PAGES.items():
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.M)
        slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings}
        anchors |= {name, *(f"{name}#{slug}" for slug in slugs)}
    links = {f"{name}{link}" if link.startswith("#") else link for name, page in PAGES.items() for link in LINK(page)}
    assert {link for link in links if link.startswith("audit")} <= anchors


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_every_snippet_is_python(code: str) -> None:
    ast.parse(code)  # knows no scopes: a return or an await at the top is no error to it


def test_every_flag_is_explained_with_its_default() -> None:
    explained = {flag: default.strip() for flag, default in re.findall(r"^\| `(--[\w-]+)` \|([^|]*)\|", USE, re.M)}
    defaults = {f"--{field.name.replace('_', '-')}": field.default for field in fields(Audit)}
    shown = {
        flag: "" if value in (None, (), False) else str(value).removesuffix(".0") for flag, value in defaults.items()
    }
    assert explained == shown
