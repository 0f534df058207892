"""The pytest plugin: audits that are asked for, and nothing else."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, environment, shims

from lockstep import pytest_plugin

CLEAN, BUGGY = (
    f"{ROOT}/tests/audit/zoo/06_epochs/{name}_set_epoch{rest}.py" for name, rest in (("ok", ""), ("bug", "_missing"))
)
SETTINGS = f"[tool.pytest.ini_options]\nlockstep_audit = ['--steps 0 {CLEAN}', '--steps 0 {BUGGY}']\n"


def run_pytest(folder: Path, *words: str, settings: str = SETTINGS) -> subprocess.CompletedProcess[str]:
    (folder / "pyproject.toml").write_text(settings)
    (folder / "test_one.py").write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lockstep.pytest_plugin", "-p", "no:cacheprovider", *words]
    there = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    return subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, timeout=200, check=False)


def test_the_plugin_is_an_entry_point_and_imports_no_torch() -> None:
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert entry == {"lockstep": pytest_plugin.__name__}
    code = "import sys, lockstep.pytest_plugin; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_without_the_option_nothing_is_audited(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_the_option_without_scripts_says_what_to_write(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--lockstep-audit", settings="")
    assert done.returncode == 4 and 'lockstep_audit = ["train.py --epochs 1"]' in done.stderr


def test_scripts_can_be_chosen_by_name(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--lockstep-audit", "--collect-only", "-k", "missing")
    assert (
        "bug_set_epoch_missing" in done.stdout and "ok_set_epoch" not in done.stdout and "test_one" not in done.stdout
    )


@pytest.mark.slow
def test_a_script_with_a_bug_fails_with_its_report(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--lockstep-audit")
    assert done.returncode == 1 and "2 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "error same-order" in done.stdout and "sampler.set_epoch(epoch)" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_the_fixture_audits_a_script_and_returns_the_report(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(shims() / "python"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    run = pytest_plugin.lockstep_audit.__wrapped__(request)  # type: ignore[attr-defined]
    report = run(BUGGY, steps=0, ignore=("same-order",), fail_on="note")
    assert report["findings"] == [] and [f["name"] for f in report["ignored"]] == ["same-order"]
    with pytest.raises(pytest.fail.Exception, match="same-order"):
        run(BUGGY, steps=0)
