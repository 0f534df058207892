"""README.zh-CN.md says what README.md says: the same commands, code, output, figures, links and sections."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")


def blocks(page: str) -> list[tuple[str, list[str]]]:
    """Return the language and the lines of each fenced block; of bash, the commands without comments."""
    return [
        (language, [command(line) for line in text.splitlines()] if language == "bash" else text.splitlines())
        for language, text in FENCE.findall(page)
    ]


def command(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line).rstrip()


def prose(page: str) -> str:
    return FENCE.sub("", page)


def headings(page: str) -> list[int]:
    """Return the level of each heading."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.M)]


def links(page: str) -> list[str]:
    """Return the targets of links and pictures, but for the link to the README in the other language."""
    return [target for target in targets(page) if target not in ("README.md", "README.zh-CN.md")]


def targets(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def code_spans(page: str) -> set[str]:
    return set(CODE.findall(prose(page)))


def figures(page: str) -> Counter[str]:
    """Return the numbers in the prose: what was measured and what is promised."""
    text = re.sub(r"\]\([^)]*\)", "", CODE.sub("", prose(page)))
    return Counter(re.findall(r"(?<![A-Za-z\d.])\d+(?:[.,]\d+)*(?:e-\d+)?", text))


def test_code_blocks_have_the_same_commands_code_and_output() -> None:
    assert blocks(ENGLISH) and blocks(CHINESE) == blocks(ENGLISH)


def test_sections_have_the_same_levels_in_the_same_order() -> None:
    assert headings(CHINESE) == headings(ENGLISH)


def test_links_and_pictures_have_the_same_targets() -> None:
    assert links(CHINESE) == links(ENGLISH)


def test_each_page_links_to_the_other() -> None:
    assert "](README.md)" in CHINESE.splitlines()[0]
    assert "README.zh-CN.md" in targets(ENGLISH)


def test_targets_of_the_chinese_page_exist() -> None:
    assert all((ROOT / target).exists() for target in targets(CHINESE))


def test_flags_files_and_commands_in_the_prose_are_the_same() -> None:
    assert code_spans(CHINESE) == code_spans(ENGLISH)


def test_figures_in_the_prose_are_the_same() -> None:
    assert figures(CHINESE) == figures(ENGLISH)


PAGE = """
```bash
make train   # install
lockstep train dit --nproc 2   # two ranks
```
```python
x = 1  # one
```
```
 2 ranks   ok
```
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--nproc 2", "--nproc 4"),
        ("make train   # install\n", ""),
        ("# one", "# 一"),
        (" 2 ranks   ok", " 2 ranks  ok"),
        ("```python", "```bash"),
        ("```\n 2 ranks   ok\n```\n", ""),
    ],
)
def test_a_changed_block_is_detected(old: str, new: str) -> None:
    assert old in PAGE
    assert blocks(PAGE.replace(old, new)) != blocks(PAGE)


def test_a_translated_comment_of_a_command_is_not_a_change() -> None:
    assert blocks(PAGE.replace("   # install", " # 安装")) == blocks(PAGE)
