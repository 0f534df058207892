"""What a disk may hold after a power failure, at every system call that changes it.

    with Disk(folder) as disk:
        ...                           # anything that writes below the folder
    for state in disk.states: ...     # each is a tree that the power failure may leave

The model is the weakest that POSIX allows. A file has what it had at its last fsync; what was written since is lost,
zeros, or there, in all files alike or in one file alone. The names in a folder are those of its last fsync; of the
changes since, any may be there or not, in any order (tried: the first few, each alone, all but each); only a rename is
done as a whole.

Calls are seen where Python makes them. What native code does in between (safetensors writes, and renames a file of its
own) is found by comparing the folder before and after, so nothing passes unseen; each file is told by its inode, which
is kept open so that no other file gets its number.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

CALLS = ("fsync", "fdatasync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "symlink", "link", "truncate")
Tree = dict[str, bytes | Path | None]
"""By path: the bytes of a file, None for a folder, the target of a link."""


@dataclass
class File:
    current: bytes | Path
    flushed: bytes = b""
    """A new file is empty."""

    def is_flushed(self) -> bool:
        return isinstance(self.current, Path) or self.current == self.flushed  # a link is written with its name

    def after_cut(self, unflushed: str) -> bytes | Path:
        """Return what is left, if bytes that were not flushed are `lost`, `zeros` or `kept`."""
        if isinstance(self.current, Path) or unflushed == "kept":
            return self.current
        return self.flushed if unflushed == "lost" or self.is_flushed() else bytes(len(self.current))


@dataclass
class Folder:
    current: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """Names of one folder that one call has changed; None for those that are gone."""

    folder: int
    names: dict[str, int | None]


class Disk:
    """Records what a folder may hold after a power failure, from `with` on; what is in it before is flushed."""

    def __init__(self, root: Path, promise: Callable[[], Any] = lambda: None):
        self.root, self.promise = root, promise
        """What must hold after a power failure now: kept with each state."""
        self.states: dict[tuple[frozenset[tuple[str, bytes | Path | None]], Any], str] = {}
        """(tree, promise), and the call after which it was found first."""
        self.calls: list[str] = []
        self._nodes: dict[int, File | Folder] = {}
        self._pending: list[Change] = []
        self._open: list[int] = []
        self._real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> "Disk":
        self._observe()
        for node in self._nodes.values():
            _flush(node)
        self._pending.clear()
        for name in CALLS:
            setattr(os, name, self._recorded(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)
        self._cut("the end")
        for handle in self._open:
            os.close(handle)

    def _recorded(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._cut(f"before {name}")
            result = self._real[name](*args, **kwargs)
            self._observe()
            if "sync" in name:
                self._flushed(os.fstat(args[0]).st_ino)
            self.calls.append(name)
            self._cut(f"{name} {args[0]}")
            return result

        return call

    def _flushed(self, inode: int) -> None:
        if inode in self._nodes:
            _flush(self._nodes[inode])
            self._pending = [change for change in self._pending if change.folder != inode]

    def _observe(self) -> None:
        """Compare the folder with what is known of it."""
        self._visit(str(self.root), self.root.stat().st_ino)

    def _visit(self, path: str, inode: int) -> None:
        node = self._nodes.setdefault(inode, Folder())
        assert isinstance(node, Folder)
        found = {entry.name: entry.inode() for entry in os.scandir(path)}
        self._pending += [Change(inode, names) for names in _changes(node.current, found)]
        node.current = found
        for entry in os.scandir(path):
            if entry.inode() not in self._nodes:
                self._open.append(os.open(entry.path, os.O_PATH | os.O_NOFOLLOW))
            if entry.is_dir(follow_symlinks=False):
                self._visit(entry.path, entry.inode())
                continue
            file_path = Path(entry.path)
            content = file_path.readlink() if entry.is_symlink() else file_path.read_bytes()
            file = self._nodes.setdefault(entry.inode(), File(content))
            assert isinstance(file, File)
            if file.current != content:
                file.current = content

    def _cut(self, when: str) -> None:
        """Add what a power failure at this moment may leave."""
        self._observe()
        promise = self.promise()
        for changes in _subsets(self._pending):
            for data in self._data():
                tree: Tree = {}
                self._build(tree, self.root.stat().st_ino, "", changes, data)
                self.states.setdefault((frozenset(tree.items()), promise), when)

    def _data(self) -> Iterator[Callable[[int], str]]:
        """Yield functions from a file to what is left of its bytes that were not flushed."""
        yield from (lambda _: "lost", lambda _: "zeros", lambda _: "kept")
        unflushed = [i for i, node in self._nodes.items() if isinstance(node, File) and not node.is_flushed()]
        for one in unflushed if len(unflushed) > 1 else ():
            yield lambda inode, one=one: "lost" if inode == one else "kept"  # type: ignore[misc]
            yield lambda inode, one=one: "kept" if inode == one else "lost"  # type: ignore[misc]

    def _build(self, tree: Tree, inode: int, path: str, changes: list[Change], data: Callable[[int], str]) -> None:
        node = self._nodes[inode]
        if isinstance(node, File):
            tree[path] = node.after_cut(data(inode))
            return
        names: dict[str, int | None] = {**node.flushed}
        for change in changes:
            if change.folder == inode:
                names |= change.names
        if path:
            tree[path] = None
        for name, child in names.items():
            if child is not None:
                self._build(tree, child, f"{path}/{name}" if path else name, changes, data)


def _flush(node: File | Folder) -> None:
    if isinstance(node, Folder):
        node.flushed = dict(node.current)
    elif isinstance(node.current, bytes):
        node.flushed = node.current


def _changes(before: dict[str, int], now: dict[str, int]) -> Iterator[dict[str, int | None]]:
    """Yield the names that have changed one by one, but the old and the new name of a rename together."""
    gone = {inode: name for name, inode in before.items() if name not in now}
    for name, inode in now.items():
        if before.get(name) != inode:
            yield {name: inode} | ({gone.pop(inode): None} if inode in gone else {})
    yield from ({name: None} for name in gone.values())


def _subsets(changes: list[Change]) -> Iterator[list[Change]]:
    """Which changes may be on the disk: the first few, each alone, all but each."""
    for i in range(len(changes)):
        yield changes[:i]
        yield [changes[i]]
        yield changes[:i] + changes[i + 1 :]
    yield changes


def restore(state: frozenset[tuple[str, bytes | Path | None]], folder: Path) -> None:
    """Write a tree into a new folder."""
    folder.mkdir()
    for name, content in sorted(state):
        path = folder / name
        if content is None:
            path.mkdir()
        elif isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
