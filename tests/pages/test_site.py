"""The site: every page is in its navigation, links lead somewhere, and it builds without warnings where it can."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

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


def test_links_out_of_docs_become_text_or_links_into_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("repository_links", DOCS / "repository_links.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)

    class Page:
        class file:  # noqa: N801
            src_uri = "zh/index.md"

    class Config:
        repo_url = ""

    markdown = "[a](../run.md) [b](../../deploy/README.md#x)"
    assert hook.on_page_markdown(markdown, Page, Config) == "[a](../run.md) b"
    Config.repo_url = "https://host/lockstep/"
    assert hook.on_page_markdown(markdown, Page, Config).endswith(
        "[b](https://host/lockstep/blob/main/deploy/README.md)"
    )


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if not importlib.util.find_spec("mkdocs") or not importlib.util.find_spec("material"):
        pytest.skip("mkdocs-material is not installed: make docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True)
    assert (tmp_path / "index.html").is_file() and (tmp_path / "zh/index.html").is_file()
