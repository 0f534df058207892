"""Where a run comes from: the code, versions, devices and data of each launch, recorded in its receipt."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from .distributed import World
from .exact import environment
from .flags import Request
from .registry import file_of, spec_of


def launch_facts(
    world: World, request: Request, step: int, resumed_from: Path | None, data: dict[str, list[str]]
) -> dict[str, Any]:
    """Return what this launch, from `step` on, runs with; `data` has digests of some samples of each split."""
    spec = spec_of(request.recipe)
    versions = {"python": platform.python_version(), **environment(world)}
    hardware = {name: versions.pop(name) for name in ("GPU", "CPU") if name in versions}
    return {
        "step": step,
        "resumed_from": str(resumed_from.resolve()) if resumed_from else None,
        "world": world.size,
        "hardware": hardware | {"device": world.device.type},
        "versions": versions,
        "lockstep": f"{importlib.metadata.version('lockstep-train')} {_digest(Path(__file__).parent)}",
        "recipe": f"{spec} {_digest(file_of(spec))}".strip(),
        "data": data,
        "settings": request.settings(),
    }


def launches_of(before: list[dict[str, Any]], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the launches that a run is made of: those before it up to its step, and this one."""
    return [launch for launch in before if launch["step"] < now["step"]] + [now]


def _digest(path: Path | None) -> str:
    """Return a short hash of a Python file, or of all of them in a folder; nothing for no path."""
    if path is None:
        return ""
    hasher = hashlib.sha256()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        hasher.update(file.name.encode() + file.read_bytes())
    return hasher.hexdigest()[:12]
