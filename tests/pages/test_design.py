"""docs/design.md is the map of the package: every module once, and imports go down."""

import ast
import re
from pathlib import Path

from processes import ROOT

PACKAGE = ROOT / "lockstep"
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
BESIDE = "Beside the floors"
UP = re.findall(r"`(\w+)` → `(\w+)`", PAGE)
"""Imports that go up, as the page says."""


def floors() -> dict[str, list[str]]:
    """Return the modules of each floor, from top to bottom."""
    page = PAGE.partition("## The map")[2].partition("## Where to begin")[0]
    sections = re.split(r"^### (.*)\n", page, flags=re.M)[1:]
    return {
        title: re.findall(r"^\| `(\w+)/?` \|", text, re.M)
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


def modules() -> list[str]:
    files = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    return sorted(files + [path.parent.name for path in PACKAGE.glob("*/__init__.py")])


def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, also within functions."""
    package = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] for name in names if name[0] == "lockstep" and len(name) > 1}
        if isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                module = ["lockstep", *package[: len(package) - node.level + 1], *module]
            if module[:1] == ["lockstep"]:
                found |= {module[1]} if len(module) > 1 else {alias.name for alias in node.names}
    return found & {*modules()}


def wrong_imports(map_: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return who imports what from a higher floor, or from beside the floors."""
    floor = {name: i for i, names in enumerate(n for title, n in map_.items() if title != BESIDE) for name in names}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if here in floor:
            found += [(here, there) for there in imports(path) if floor.get(there, -1) < floor[here]]
    return found


def test_every_module_is_on_the_map_once() -> None:
    assert sorted(name for names in floors().values() for name in names) == modules()


def test_a_package_is_marked_as_one() -> None:
    for name in re.findall(r"^\| `(\w+)/` \|", PAGE, re.M):
        assert (PACKAGE / name).is_dir()


def test_no_module_imports_from_a_higher_floor() -> None:
    assert sorted({*wrong_imports(floors())} - {*UP}) == []


def test_imports_that_go_up_as_the_page_says_are_still_there() -> None:
    assert [pair for pair in UP if pair not in wrong_imports(floors())] == []


def test_an_import_that_goes_up_is_noticed() -> None:
    map_ = floors()
    titles = [title for title in map_ if title != BESIDE]
    upside_down = {title: map_[title] for title in reversed(titles)} | {BESIDE: map_[BESIDE]}
    assert ("trainer", "step") in wrong_imports(upside_down)


def test_recipes_import_definitions_and_plain_functions_only() -> None:
    map_ = floors()
    allowed = {*map_["Definitions"], *map_["Files and plain functions"], "recipes"}
    found = {(path.name, name) for path in (PACKAGE / "recipes").rglob("*.py") for name in imports(path) - allowed}
    assert sorted(found) == []
