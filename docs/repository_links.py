"""A hook of mkdocs: links from docs/ to other files of the repository, which are not part of the site."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\[]*)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links out of docs/ as links into the repository, or as plain text if `repo_url` is unset."""

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith("docs/"):
            return link[0]
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return LINK.sub(replaced, markdown)
