"""[tool.lockstep.audit] in the pyproject.toml of the audited project: flags that every audit there begins with."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..nearest import nearest
from ..options import Audit
from .ignores import Ignore, by_name

_SECTION = "[tool.lockstep.audit]"


@dataclass(frozen=True)
class ProjectSettings:
    """What the project says: flags, before those of the command line, and what it ignores."""

    flags: list[str]
    ignores: list[Ignore]


def project_settings(script: list[str]) -> ProjectSettings:
    """Return the settings of the nearest pyproject.toml around the script, or around the current folder for -m."""
    start = Path.cwd() if script[:1] in ([], ["-m"]) else Path(script[0]).resolve().parent
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _settings(file)
    return ProjectSettings([], [])


def _settings(file: Path) -> ProjectSettings:
    try:
        table = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    section = table.get("tool", {}).get("lockstep", {}).get("audit", {})
    known = [field.name for field in fields(Audit)]
    flags, ignores = list[str](), list[Ignore]()
    for written, value in section.items():
        name = written.replace("-", "_")
        if name not in known:
            raise ValueError(f"{file}: {_SECTION} has no setting {written!r}{nearest(name, known)}")
        if name == "ignore":
            if not isinstance(value, list):
                raise ValueError(f"{file}: ignore is a list of names, not {value!r}")
            ignores = by_name([str(name) for name in value], file.name)
        else:
            flags += _flags(name, value)
    return ProjectSettings(flags, ignores)


def _flags(name: str, value: Any) -> list[str]:
    """A setting as words of the command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}", str(value)]
