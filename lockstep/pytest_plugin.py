"""pytest plugin: `pytest --lockstep-audit` audits the scripts of a project, and a fixture audits one in a test.

In pyproject.toml, one script a line, with the flags of the audit before it and its own after it:

    [tool.pytest.ini_options]
    lockstep_audit = ["train.py --epochs 1", "--steps 0 --ignore local-batch-norm finetune.py --tiny"]

Each audit runs in a process of its own. Without the option or the fixture nothing is imported, torch least of all.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_INI = "lockstep_audit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lockstep").addoption(
        "--lockstep-audit", action="store_true", help=f"also audit the training scripts in the setting {_INI}"
    )
    parser.addini(_INI, "training scripts to audit, as after `lockstep audit`, one a line", type="linelist")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--lockstep-audit"):
        return
    commands = config.getini(_INI)
    if not commands:
        raise pytest.UsageError(f'--lockstep-audit: name the scripts, {_INI} = ["train.py --epochs 1"] in the settings')
    for command in commands:
        items.append(AuditItem.from_parent(session, name=f"lockstep audit {command}", command=command))


class AuditFailed(Exception):
    """The script failed the audit, or could not be audited; holds what the audit printed."""


class AuditItem(pytest.Item):
    """One script of the settings."""

    def __init__(self, *, command: str, **about: Any):
        super().__init__(**about)
        self.command = command

    def runtest(self) -> None:
        audit(shlex.split(self.command), self.config.rootpath)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, AuditFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath, None, self.name


@pytest.fixture
def lockstep_audit(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Return a function that audits a script and fails the test for its bugs: `lockstep_audit("train.py", "--epochs",
    "1", steps=0)`. Keywords are flags of the audit; it returns the report, as --json has it."""

    def run(script: str | Path, *words: str, **flags: Any) -> dict[str, Any]:
        own = [word for name, value in flags.items() for word in _flag(name, value)]
        try:
            return audit([*own, "--", str(script), *words], request.config.rootpath)
        except AuditFailed as failed:
            pytest.fail(str(failed), pytrace=False)

    return run


def audit(words: list[str], folder: Path) -> dict[str, Any]:
    """Run `lockstep audit` in a folder and return its report; AuditFailed with the text if it does not pass."""
    with tempfile.TemporaryDirectory(prefix="lockstep-pytest-") as place:
        file = Path(place) / "audit.json"
        command = [sys.executable, "-m", "lockstep", "audit", "--json", str(file), *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AuditFailed((done.stdout + done.stderr).rstrip())
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, (list, tuple)):
        return [word for one in value for word in (flag, str(one))]
    return [flag, str(value)]
