"""A copy of the current folder, so that a run can write its checkpoints without touching those that are there."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..events import Event
from ..model import Trace
from ..source import Site

_LEFT_OUT = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_LARGE = 32 << 20
"""Bytes from which on a file is linked instead of copied."""
_MOST_FILES = 20_000
"""Files that are copied; folders after that are linked as a whole."""


class Mirror:
    """A copy of a folder: small files are copied, large ones and everything after `_MOST_FILES` linked."""

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self._copied = source.resolve(), target.resolve(), 0
        self._fill(self.source, self.target)

    def _fill(self, source: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for entry in sorted(os.scandir(source), key=lambda e: (e.is_dir(follow_symlinks=False), e.name)):
            there = target / entry.name
            if entry.name in _LEFT_OUT or Path(entry.path) == self.target:
                continue
            with suppress(OSError):  # a socket, or a file that may not be read
                if entry.is_symlink() or self._copied > _MOST_FILES:
                    there.symlink_to(Path(entry.path).resolve())
                elif entry.is_dir():
                    self._fill(Path(entry.path), there)
                elif entry.is_file() and entry.stat().st_size < _LARGE:
                    shutil.copy2(entry.path, there)
                    self._copied += 1
                else:
                    there.symlink_to(entry.path)

    def restore_lines(self, trace: Trace) -> Trace:
        """Return the trace with the lines of the original files in place of those of their copies."""
        for rank in trace.ranks:
            for events in (rank.events, *rank.workers):
                for event in events:
                    self._restore(event)
            rank.stack = [self._original(at) for at in rank.stack]
            rank.printed = rank.printed.replace(f"{self.target}{os.sep}", "")
        return trace

    def _restore(self, event: Event) -> None:
        event.at = self._original(event.at) if event.at else None

    def _original(self, at: Site) -> Site:
        inside = at.file.startswith(f"{self.target}{os.sep}")
        return Site(str(self.source / Path(at.file).relative_to(self.target)), at.line) if inside else at
