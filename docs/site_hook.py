"""A hook of mkdocs: pages are written for GitHub, and this is what its Markdown does otherwise.

Links from docs/ to other files of the repository lead into it, or are plain text. A table or a list may follow a
paragraph or a block of code without an empty line between them.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\[]*)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
ROW = re.compile(r"\|")
ITEM = re.compile(r"(?:-|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page as mkdocs needs it."""
    return _with_empty_lines(_with_links(markdown, page.file.src_uri, config.repo_url or ""))


def _with_links(markdown: str, page: str, repository: str) -> str:
    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({repository.rstrip('/')}/blob/main/{path})" if repository else link[1]

    return LINK.sub(replaced, markdown)


def _with_empty_lines(markdown: str) -> str:
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        before = lines[-1] if lines else ""
        for kind in (ROW, ITEM):
            if not in_code and before.strip() and kind.match(line) and not kind.match(before) and before[0] != " ":
                lines.append("")
        in_code ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines)
