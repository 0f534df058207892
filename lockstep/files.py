"""Files that are whole or not there: written beside, flushed, renamed; and files of lines that grow with a run."""

import errno
import hashlib
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

TEMPORARY = re.compile(r"\..+\.(\d+)\.[0-9a-f]{32}\.tmp")
"""The names of temporary files of `replacing`, with the number of the process that writes them."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written to it replaces `path` on leaving without an exception.

    A reader, and a process that is killed, finds the old file or the new one, never a part of it. Its mode follows
    the umask, whoever writes it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        flush(temporary, mode)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path, mode: int | None = None) -> None:
    """Write a file to the disk, with this mode: safetensors creates files that only their owner can read."""
    with path.open("rb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(mode))
        os.fsync(file.fileno())


def manifest_entry(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def write_text(path: Path, text: str) -> None:
    """Replace the contents of `path`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def read_text(path: Path) -> str:
    """Return the text of a user's file; bytes that are not UTF-8 survive, as they do in the names of files."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def printable(text: str) -> str:
    """Return the text with bytes that are not UTF-8, as a file's name may hold, written out: `caf\\xe9`."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def make_folder(path: Path, exist_ok: bool = True) -> None:
    """Create a folder and those above it; a power cut does not take them away again, nor what is saved in them."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    for folder in new:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder: only then does a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without this cannot do more
            raise
    finally:
        os.close(handle)


class StepLines:
    """A file of JSON objects, one a line, each with a `step`; a run appends to it.

    Lines of steps after `last` are removed, and so is one that a crash cut off. What the disk does not take stays in
    memory and is written with the next line.
    """

    def __init__(self, path: Path, last: float = math.inf):
        self.path, self._last, self._waiting = path, last, bytearray()
        self._file: IO[bytes] | None = None
        with suppress(OSError):  # the first `append` tries again, and raises
            self._write()

    def append(self, content: Mapping[str, Any]) -> None:
        """Write one more line; raises OSError if the disk does not take it, but keeps it."""
        self._waiting += json.dumps(content, allow_nan=False).encode() + b"\n"
        self._write()

    def close(self) -> bool:
        """Return whether all lines have been written."""
        with suppress(OSError):
            self._write()
        if self._file is not None:
            self._file.close()
        return not self._waiting

    def _write(self) -> None:
        self._file = self._file or self._open()
        while self._waiting:  # a full disk may take half a line: the other half stays, and is the first to follow
            del self._waiting[: self._file.write(self._waiting)]

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            with replacing(self.path) as clean, self.path.open("rb") as old, clean.open("wb") as new:
                new.writelines(line for line in old if self._is_kept(line))
        return self.path.open("ab", buffering=0)

    def _is_kept(self, line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and bool(json.loads(line)["step"] <= self._last)
        except (ValueError, TypeError, KeyError):
            return False
