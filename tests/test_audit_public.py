"""The table of public scripts: complete, of findings that exist, and its page is what the table says."""

import re
import sys
from pathlib import Path

import pytest
from processes import ROOT, shims

sys.path.insert(0, str(ROOT / "benchmarks"))
import audit_public
from audit_public import PAGE, Script, as_page, as_toml, audited, score, scripts

from lockstep.audit.catalog import KINDS


def test_there_are_forty_scripts_with_commit_expectation_and_result() -> None:
    table = scripts()
    assert len({(s.repository, s.commit, s.file) for s in table}) == len(table) >= 40
    for script in table:
        assert re.fullmatch(r"[0-9a-f]{40}", script.commit) and script.why
        assert set(script.expected) | set(script.last or ()) <= set(KINDS)
        assert (script.last is None) == bool(script.needs)
        assert Path(script.file).name in script.run or "trainer.py" in script.file


def test_the_page_is_that_of_the_table(tmp_path: Path) -> None:
    assert as_page(scripts()) == PAGE.read_text()
    (tmp_path / "table.toml").write_text(as_toml(scripts()))
    assert scripts(tmp_path / "table.toml") == scripts()


def script(expected: list[str], last: list[str] | None) -> Script:
    return Script("a/b", "0" * 40, "train.py", "--steps 0 -- train.py", expected, "why", last)


def test_the_score_counts_what_is_right_wrong_and_missed() -> None:
    run = [script(["same-order", "waits"], ["same-order", "starved"]), script([], [])]
    total = score(run)
    assert (total.right, len(total.wrong), len(total.missed)) == (1, 1, 1)
    assert str(score(run, "error")) == "1 of 1 found are right; 1 of 1 that are there were found"


@pytest.mark.slow
def test_a_script_in_a_folder_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(shims() / "python"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    there = script(["same-order"], None)
    there.place(tmp_path).parent.mkdir(parents=True)
    source = ROOT / "tests" / "audit" / "zoo" / "06_epochs" / "bug_set_epoch_missing.py"
    there.place(tmp_path).write_text(source.read_text())
    assert audited(there, tmp_path) == ["same-order"]


def test_nothing_is_fetched() -> None:
    source = Path(audit_public.__file__).read_text()
    assert not re.search(r"urllib|requests|http|git clone|socket", source)
