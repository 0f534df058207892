"""The site: every page is in its navigation, links lead somewhere, and it builds without warnings where it can."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = ("AGENTS.md", "llms.txt")


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / name for name in GUIDES)], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", prose)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", GUIDES)
def test_paths_in_the_pages_for_assistants_exist(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    paths = [span for span in re.findall(r"`([\w./-]+)`", page) if "/" in span or span.endswith((".py", ".md"))]
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists() and not (ROOT / "lockstep" / path).exists()] == []


def on_page(markdown: str, repository: str = "") -> str:
    """Return what the hook of the site makes of a page of docs/zh."""
    spec = importlib.util.spec_from_file_location("site_hook", DOCS / "site_hook.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="zh/index.md"))
    return str(hook.on_page_markdown(markdown, page, SimpleNamespace(repo_url=repository)))


def test_links_out_of_docs_become_text_or_links_into_the_repository() -> None:
    markdown = "[a](../run.md) [b](../../deploy/README.md#x)"
    assert on_page(markdown) == "[a](../run.md) b"
    linked = on_page(markdown, "https://host/lockstep/")
    assert linked == "[a](../run.md) [b](https://host/lockstep/blob/main/deploy/README.md)"


def test_tables_and_lists_are_set_off_from_what_is_before_them_but_not_in_code() -> None:
    assert on_page("text\n| a |\n|---|\n| b |") == "text\n\n| a |\n|---|\n| b |"
    assert on_page("```\nx\n```\n| a |") == "```\nx\n```\n\n| a |"
    assert on_page("text\n- one\n- two\n1. three") == "text\n\n- one\n- two\n1. three"
    assert on_page("```\nx\n| a |\n- b\n```") == "```\nx\n| a |\n- b\n```"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if not importlib.util.find_spec("mkdocs") or not importlib.util.find_spec("material"):
        pytest.skip("mkdocs-material is not installed: make docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    assert [page.name for page in pages if re.search(r"<p>(\||- )|\|---", page.read_text(encoding="utf-8"))] == []
