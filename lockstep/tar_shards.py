"""Samples in tar files, as WebDataset writes them: indexed once, then read in any order with constant memory.

    TarShards(sorted(Path("shards").glob("*.tar")))[17]
    -> {"__key__": "00017", "jpg": b"...", "cls": b"3"}

A sample is the files in a row whose names are equal up to the first dot of the file name; what follows is the field.
The index of a shard says where each sample begins and how long it is. It is written beside the shard, as `.NAME.index`,
and mapped into memory, so that ranks and loader processes share it.
"""

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .files import replacing

Fields = dict[str, Any]
Spans = NDArray[np.int64]
"""(1 + samples, 2): size and time of the shard; then of each sample its first byte and its length."""
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class TarShards(Dataset[Any]):
    """A map-style data set of all samples of some shards, in their order; the engine shuffles over all of them."""

    def __init__(
        self,
        shards: Sequence[Path | str],
        decode: Callable[[Fields], Any] = lambda fields: fields,
        index_folder: Path | None = None,
    ):
        """`decode` makes an item of a sample's fields. `index_folder`: where indices go, if not beside the shards."""
        if not shards:
            raise ValueError("there are no shards: give the paths of tar files, in an order that is always the same")
        self.shards, self.decode = [Path(shard) for shard in shards], decode
        self._mapped: dict[int, Spans] = {}
        self._indices = [_index_path(shard, index_folder) for shard in self.shards]
        self._ends = np.cumsum([len(self._spans(shard)) - 1 for shard in range(len(self.shards))])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Any:
        """Return a sample, read from its shard in one piece."""
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} samples, and no number {number}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[shard - 1]) if shard else 0) + 1
        first, length = self._spans(shard)[row].tolist()
        with self.shards[shard].open("rb") as file:
            piece = os.pread(file.fileno(), length, first)
        fields: Fields = {}
        with tarfile.open(fileobj=io.BytesIO(piece + _END), mode="r:") as members:
            for member in members:
                if member.isfile() and (content := members.extractfile(member)) is not None:
                    fields["__key__"], field = _key_and_field(member.name)
                    fields[field] = content.read()
        return self.decode(fields)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is mapped into memory: another process maps it by itself."""
        return self.__dict__ | {"_mapped": {}}

    def _spans(self, shard: int) -> Spans:
        if shard not in self._mapped:
            self._mapped[shard] = _open_index(self.shards[shard], self._indices[shard])
        return self._mapped[shard]


def _open_index(path: Path, index: Path) -> Spans:
    """Return the index of a shard: the one on disk if it is that of this file, else a new one."""
    stamp = _stamp(path)
    if (found := _load(index, stamp)) is None:
        made = np.array([stamp, *_scan(path)], dtype=np.int64)
        try:
            with replacing(index) as temporary, temporary.open("wb") as file:  # np.save adds a suffix to a path
                np.save(file, made)
        except OSError as error:
            raise ValueError(
                f"the index of {path} cannot be written to {index.parent} ({error.strerror}); give an index_folder"
            ) from None
        found = _load(index, stamp)
    return made if found is None else found


def _load(index: Path, stamp: list[int]) -> Spans | None:
    with suppress(OSError, ValueError, EOFError):
        found: Spans = np.load(index, mmap_mode="r")
        if found[0].tolist() == stamp:
            return found
    return None


def _index_path(shard: Path, folder: Path | None) -> Path:
    if folder is None:
        return shard.with_name(f".{shard.name}.index")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{shard.absolute().as_posix().strip('/').replace('/', '-')}.index"


def _stamp(path: Path) -> list[int]:
    """Return what tells one version of a file from another."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"the shard {path} cannot be read ({error.strerror})") from None
    return [status.st_size, status.st_mtime_ns]


def _scan(path: Path) -> Iterator[list[int]]:
    """Yield the first byte and the length of each sample of a shard; only headers are read."""
    before, first, end, last = "", 0, 0, 0
    seen = set[int]()
    try:
        with tarfile.open(path, mode="r:") as members:
            for member in members:
                members.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all of them otherwise
                last = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isfile() else 0)
                if not member.isfile():
                    continue
                key, _ = _key_and_field(member.name)
                if key != before:
                    if end > first:
                        yield [first, end - first]
                    before, first = key, member.offset
                    if hash(key) in seen:
                        raise ValueError(f"{path} has the files of sample {key} in two places; they must be in a row")
                    seen.add(hash(key))
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} is no tar file that can be indexed ({error}); a compressed one must be unpacked first, as its "
            "samples cannot be read one by one"
        ) from None
    _check_end(path, last, before)
    if end > first:
        yield [first, end - first]


def _check_end(path: Path, end: int, last_sample: str) -> None:
    """Raise a ValueError unless only the end of an archive follows: tarfile ends silently at a damaged header."""
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(len(_END))
        if rest == _END and not any(any(piece) for piece in iter(lambda: file.read(1 << 20), b"")):
            return
    raise ValueError(
        f"{path} does not end after sample {last_sample} (byte {end}) as an archive does: it is damaged or cut off, or "
        "several archives were put into one file; write it anew"
    )


def _key_and_field(name: str) -> tuple[str, str]:
    """Return what comes before the first dot of a file's name, with its folders, and what comes after it."""
    folder, _, file = name.rpartition("/")
    key, _, field = file.partition(".")
    return f"{folder}/{key}".lstrip("/"), field.lower()
