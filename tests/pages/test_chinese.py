"""docs/zh says what docs says: the same commands and code; short pages have some of them, in the same order."""

import re
from pathlib import Path

import pytest
from processes import ROOT

from pages.commands import Command, commands

DOCS = ROOT / "docs"
WHOLE = ("index", "quick-start", "multi-node", "batch-size", "resume", "compared")
PAGES = sorted(path.stem for path in (DOCS / "zh").glob("*.md"))
CODE = re.compile(r"`([^`\n]+)`")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def words_of(found: list[Command]) -> list[tuple[str, ...]]:
    return [command.words for command in found]


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)


def targets(page: str) -> list[str]:
    """Return the pages that a page links to, each by its name in docs/, whatever its language."""
    found = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", without_blocks(page))
    return sorted({target.rpartition("/")[2] for target in found if target.endswith(".md")})


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_page_has_the_same_commands(name: str) -> None:
    chinese = words_of(commands(text(DOCS / "zh" / f"{name}.md")))
    assert chinese == words_of(commands(text(DOCS / f"{name}.md")))


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_page_has_the_same_sections_and_tables(name: str) -> None:
    chinese, english = (without_blocks(text(folder / f"{name}.md")) for folder in (DOCS / "zh", DOCS))
    shape = re.compile(r"^(#+ |\||- |\d\. )", re.M)
    assert shape.findall(chinese) == shape.findall(english)


@pytest.mark.parametrize("name", sorted({*PAGES} - {*WHOLE}))
def test_a_short_page_has_commands_of_the_english_one(name: str) -> None:
    english = words_of(commands(text(DOCS / f"{name}.md") + text(ROOT / "README.md")))
    own = [words for words in words_of(commands(text(DOCS / "zh" / f"{name}.md"))) if words[1] != "verify"]
    assert own and [words for words in own if words not in english] == []


def test_the_chinese_page_on_recipes_has_the_recipe_of_the_readme() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", text(DOCS / "zh/your-own-recipe.md"), re.S)
    assert block in text(ROOT / "README.md")


def test_the_chinese_page_on_loops_has_the_loop_of_the_english_one() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", text(DOCS / "zh/your-own-loop.md"), re.S)
    assert block in text(DOCS / "your-own-loop.md")


def test_every_whole_page_exists_in_both_languages_and_they_link_to_each_other() -> None:
    assert {*WHOLE} <= {*PAGES}
    assert "zh/index.md" in text(DOCS / "index.md") and "../index.md" in text(DOCS / "zh/index.md")
