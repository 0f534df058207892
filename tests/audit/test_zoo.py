"""Every buggy script is found by its own finding, every clean one is silent."""

from pathlib import Path

import pytest

from audit.zoo import SCRIPTS, ZOO, expected, found
from lockstep.audit.catalog import KINDS


def chosen() -> list[Path]:
    """One script with each finding, and all that only look suspicious; `make zoo` goes through all there are."""
    bugs = {name: s for s in reversed(SCRIPTS) for name in expected(s)[0]}
    traps = [s for s in SCRIPTS if "Looks suspicious" in s.read_text()]
    return sorted({*bugs.values(), *traps})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", chosen(), ids=lambda s: f"{s.parent.name}/{s.stem}")
def test_the_audit_finds_what_is_wrong_and_nothing_else(script: Path) -> None:
    must, may = expected(script)
    names = set(found(script))
    assert must <= names <= must | may


def test_every_finding_has_a_script_with_it_and_one_without() -> None:
    wrong = {name for s in SCRIPTS if s.name.startswith("bug_") for name in expected(s)[0]}
    own = {name for name, kind in KINDS.items() if not kind.mode}  # the others are in tests/audit/compare
    assert own - wrong == {"hangs", "crashed"}  # what is said when nothing better is known
    assert wrong <= own
    topics = {s.parent.name for s in SCRIPTS if s.name.startswith("ok_")}
    assert len(topics) == 19


def test_every_script_of_the_zoo_is_audited_and_says_what_must_be_found() -> None:
    """The numbers are those of the README: who adds a script changes them there and here."""
    assert [p for p in ZOO.glob("*/*.py") if p not in SCRIPTS] == []
    kinds = [s.name.split("_")[0] for s in SCRIPTS]
    assert (kinds.count("bug"), kinds.count("ok")) == (123, 148)
    assert all(bool(expected(s)[0]) == s.name.startswith("bug_") for s in SCRIPTS)
