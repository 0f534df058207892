"""Files in folders: found once each, whatever links lead to them, and never opened if they are not plain files."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def data_folder(path: str, remedy: str = "correct --data_path") -> Path:
    """Return the folder that `data_path` names, which has to exist."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data_path is a folder, {path} {'is a file' if folder.exists() else 'is missing'}; {remedy}")
    return folder


def special_kind(path: Path) -> str | None:
    """Return what a path is if it is no file, such as "a FIFO", which nothing may open: that waits for a writer."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a broken link" if path.is_symlink() else None  # a missing file: whoever opens it says why
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def files_below(roots: Sequence[Path], endings: tuple[str, ...], special: bool = False) -> dict[Path, list[Path]]:
    """Return, for each root, the files in it and below that have one of the endings, sorted, without hidden ones.

    Links are followed. A folder that several links lead to, or that lies above the roots (a loop), is read once: where
    it really is or, if that is outside of the roots, through the first link. A FIFO, socket, device or broken link with
    such an ending is refused; with `special` it is returned as well.
    """
    found: dict[Path, list[Path]] = {root: [] for root in roots}
    walked = {_identity(parent) for root in roots for parent in root.resolve().parents}
    folders = [(root, root) for root in roots if not root.is_symlink()]
    links = [(root, root) for root in roots if root.is_symlink()]
    while folders or links:
        root, folder = folders.pop() if folders else links.pop(0)
        if _identity(folder) in walked:
            continue
        walked.add(_identity(folder))
        for entry in _entries(folder):
            path = folder / entry.name
            if _is_dir(entry):
                (links if entry.is_symlink() else folders).append((root, path))
            elif entry.name.lower().endswith(endings):
                if not special and not entry.is_file(follow_symlinks=False) and (kind := special_kind(path)):
                    raise ValueError(f"{path} is {kind}, not a file; remove or replace it")
                found[root].append(path)
    return {root: sorted(files) for root, files in found.items()}


def leads_up(path: Path, folder: Path) -> bool:
    """Return whether a path in `folder` is a link to that folder or to one above it."""
    return path.is_symlink() and path.resolve() in (folder.resolve(), *folder.resolve().parents)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        state = folder.stat()
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be read ({error.strerror}); correct the path") from None
    return state.st_dev, state.st_ino


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, sorted: every rank must find the same files in the same order."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be read ({error.strerror}); correct its permissions") from None


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
