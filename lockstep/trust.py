"""Recipe files that the user has trained with: only these are executed because the receipt of a run names them.

A run may come from elsewhere, and everything in its folder with it. So the list is kept outside of runs, one path per
line, in `$XDG_STATE_HOME/lockstep/recipe_files` (by default ~/.local/state).
"""

import os
from contextlib import suppress
from pathlib import Path


def record(file: Path) -> None:
    """Note that the user trains with this file; without a home folder that can be written, nothing is noted."""
    line = os.fsencode(file.resolve()) + b"\n"
    if is_trusted(file) or line.count(b"\n") > 1:
        return
    with suppress(OSError, RuntimeError):
        path = _list()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab", buffering=0) as opened:  # one write: of many runs that start at once, each adds a line
            opened.write(line)


def is_trusted(file: Path) -> bool:
    """Return whether the user has trained with this file on this machine."""
    with suppress(OSError, RuntimeError):
        return os.fsencode(file.resolve()) in _list().read_bytes().splitlines()
    return False


def _list() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lockstep" / "recipe_files"
