"""What passes and what fails: severities, --fail-on, ignores by name, by comment and in pyproject.toml."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from processes import environment

from lockstep.audit import command
from lockstep.audit.catalog import KINDS, Finding, finding
from lockstep.audit.decisions import decides
from lockstep.audit.events import End
from lockstep.audit.ignores import by_comments, by_name, sift
from lockstep.audit.model import Rank, Trace
from lockstep.audit.project import project_settings
from lockstep.audit.source import Site
from lockstep.audit.verdict import FailOn, Verdict

ERROR, WARNING, NOTE = "unsynchronised", "untrained-parameters", "local-batch-norm"


def verdict(names: list[str], fail_on: FailOn, status: int = 0) -> Verdict:
    trace = Trace([Rank(0, [End(status)], [], status)])
    return Verdict(["train.py"], trace, [finding(name, "x") for name in names], [], [], fail_on)


@pytest.mark.parametrize(
    ("names", "statuses"),
    [([], (0, 0, 0, 0)), ([NOTE], (0, 0, 1, 0)), ([NOTE, WARNING], (0, 1, 1, 0)), ([ERROR], (1, 1, 1, 0))],
)
def test_fail_on_moves_what_fails(names: list[str], statuses: tuple[int, ...]) -> None:
    choices: tuple[FailOn, ...] = ("error", "warning", "note", "never")
    assert tuple(verdict(names, choice).status for choice in choices) == statuses


def test_a_script_that_crashed_fails_whatever_is_chosen() -> None:
    assert verdict([], "never", status=1).status == 1


@pytest.mark.parametrize("name", ["same-order", "same-randomness", "padded-evaluation", "overlapping-splits"])
def test_silent_bugs_fail_the_audit(name: str) -> None:
    assert KINDS[name].severity == "error"


@pytest.mark.parametrize("name", ["needless-unused-search", "local-batch-norm", "in-place-checkpoint"])
def test_advice_does_not(name: str) -> None:
    assert KINDS[name].severity == "note"


SCRIPT = """
model = build()  # lockstep: ignore[no-steps, waits]
model = wrap(
    model,  # lockstep: ignore[local-batch-norm]
    device,
)
# lockstep: ignore[same-order]

for x in loader:
    step(x)
"""


def found(file: Path, name: str, line: int) -> Finding:
    return replace(finding(name, "x"), at=Site(str(file), line))


@pytest.mark.parametrize(
    ("name", "line", "hidden"),
    [
        ("no-steps", 2, True), ("waits", 2, True), ("same-order", 2, False), ("no-steps", 3, False),
        ("local-batch-norm", 3, True), ("local-batch-norm", 5, True), ("local-batch-norm", 2, False),
        ("same-order", 9, True), ("same-order", 10, False),
    ],
)  # fmt: skip
def test_a_comment_ignores_the_findings_of_its_statement(tmp_path: Path, name: str, line: int, hidden: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    ignores, wrong = by_comments(str(file))
    sifted = sift([found(file, name, line)], ignores)
    assert wrong == [] and len(sifted.ignored) == hidden and len(sifted.findings) == (not hidden)
    assert len(sifted.idle) == 4 - hidden


def test_a_comment_of_another_file_ignores_nothing_here(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT)
    ignores, _ = by_comments(str(tmp_path / "a.py"))
    assert not sift([found(tmp_path / "b.py", "no-steps", 2)], ignores).ignored


@pytest.mark.parametrize(
    ("comment", "message"),
    [("ignore[same-oder]", "no finding 'same-oder'; did you mean 'same-order'"), ("ignore", "say what is ignored")],
)
def test_a_comment_that_names_no_finding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(f"x = 1  # lockstep: {comment}\n")
    with pytest.raises(ValueError, match=f"train.py:1: .*{message}"):
        command.audit(["train.py"])


def test_an_unknown_name_on_the_command_line_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="--ignore: there is no finding 'wait'; did you mean 'waits'"):
        by_name(["wait"], "--ignore")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("ignores = []", "no setting 'ignores'; did you mean 'ignore'"),
        ("ignore = 'waits'", "ignore is a list of names"),
        ("ignore = ['wait']", "did you mean 'waits'"),
        ("steps = ", "cannot be read"),
    ],
)
def test_wrong_settings_of_a_project_are_refused(tmp_path: Path, section: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.lockstep.audit]\n{section}\n")
    with pytest.raises(ValueError, match=message):
        project_settings([str(tmp_path / "train.py")])


def test_the_settings_of_a_project_are_those_around_the_script(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.lockstep.audit]\nfail-on = 'note'\nsteps = 3\nignore = ['waits']\n")
    (tmp_path / "src").mkdir()
    settings = project_settings([str(tmp_path / "src" / "train.py")])
    assert settings.flags == ["--fail_on", "note", "--steps", "3"]
    assert [(i.name, i.origin) for i in settings.ignores] == [("waits", "pyproject.toml")]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if accuracy > best:\n    torch.save(model, 'best.pt')\n", "picks the checkpoint"),
        ("def keep():\n    torch.save(model, 'best.pt')\n\nif accuracy > best:\n    keep()\n", "picks the checkpoint"),
        ("if epoch > 3 and rank < 1:\n    torch.save(model, 'last.pt')\n", None),
        ("torch.save(model, 'last.pt')\n", None),
        ("for e in epochs:\n    if bad_epochs >= patience:\n        break\n", "stops the run"),
        ("for e in epochs:\n    if step >= max_steps:\n        break\n", None),
    ],
)
def test_what_a_metric_decides_is_read_from_the_source(tmp_path: Path, code: str, expected: str | None) -> None:
    file = tmp_path / "train.py"
    file.write_text(code)
    saves = [Site(str(file), n) for n, line in enumerate(code.splitlines(), 1) if "torch.save" in line]
    assert decides(Site(str(file), 1), saves) == expected


@pytest.mark.slow
def test_ignores_statuses_and_reports_go_together(tmp_path: Path) -> None:
    """One run: an error is ignored by a comment, a note by the project; an ignore without effect is said."""
    zoo = Path(__file__).parent / "zoo"
    source = (zoo / "06_epochs" / "bug_set_epoch_missing.py").read_text()
    loop = next(line for line in source.splitlines() if line.strip().startswith("for ") and " in loader" in line)
    (tmp_path / "train.py").write_text(source.replace(loop, f"{loop}  # lockstep: ignore[same-order]"))
    (tmp_path / "pyproject.toml").write_text("[tool.lockstep.audit]\nignore = ['waits']\nsteps = 0\n")
    words = ["lockstep", "audit", "--json", "a.json", "--sarif", "a.sarif", "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pyproject.toml (waits) ignores nothing" in done.stdout and "1 ignored" in done.stdout
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["findings"] == [] and [f["name"] for f in report["ignored"]] == ["same-order"]
    (result,) = json.loads((tmp_path / "a.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "same-order" and result["suppressions"][0]["kind"] == "inSource"
    where = result["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "train.py"
    assert "ignore[same-order]" in (tmp_path / "train.py").read_text().splitlines()[where["region"]["startLine"] - 1]
