"""Files that are whole or not there: written beside, flushed, renamed."""

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
