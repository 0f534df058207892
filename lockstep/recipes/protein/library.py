"""A folder of structure files, parsed once.

    found = Library(Path("data/pdb"), Path("data/cache"))
    found.chains                                 # file, number in the file and length of each chain
    found.load(7)                                # the item of chain 7
    found.skipped                                # files without a usable chain, and the reason

The cache holds one safetensors file per structure, named by the hash of its content, and an index by path, size and
time of change: a second start opens no structure. Files are written under a temporary name and renamed, so any
number of processes may start at once; as each begins at another file, they share the work.
"""

import hashlib
import itertools
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...files import replacing, write_text
from ..folders import files_below, special_kind
from . import structures
from .chain import ITEM


@dataclass(frozen=True)
class Entry:
    """The index entry of one file."""

    size: int
    changed: int
    """Time of change in nanoseconds."""
    content: str
    """Hash of the file's content."""
    lengths: tuple[int, ...] = ()
    """Residues of each chain."""
    why: str = ""
    """The reason if there is no chain."""


@dataclass(frozen=True)
class ChainRef:
    """The position of a chain in the library."""

    file: str
    """Relative to the folder."""
    number: int
    length: int


class Library:
    """The chains of all files under `folder`."""

    def __init__(self, folder: Path, cache: Path):
        self.folder = folder
        self.cache = cache / f"chains-v{structures.PARSER}"
        files = structure_files(folder)
        if not files:
            raise ValueError(
                f"pdb_path {folder} holds no structure ({' '.join(structures.ENDINGS)}, also in sub-folders); "
                "`lockstep data protein FOLDER` writes some"
            )
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            self.entries = self._update(files)
        except OSError as error:
            raise ValueError(f"cache_dir {cache} cannot be used: {error.strerror}; give another --cache_dir") from None
        self.skipped = {name: entry.why for name, entry in self.entries.items() if entry.why}
        self.chains = [
            ChainRef(name, k, length)
            for name, entry in sorted(self.entries.items())
            for k, length in enumerate(entry.lengths)
        ]

    def _update(self, files: dict[str, Path]) -> dict[str, Entry]:
        """Return the index, after parsing what is new."""
        where = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()[:16]
        index = self.cache / f"index-{where}.json"
        self.list_of_skipped = self.cache / f"skipped-{where}.txt"
        known = _read_index(index)
        entries = {name: entry for name, entry in known.items() if name in files and self._holds(files[name], entry)}
        missing = sorted(files.keys() - entries.keys())
        if missing:
            structures.gemmi()  # without it every file would look damaged
        first = uuid.uuid4().int % len(missing) if missing else 0  # each process begins at another file
        for name in missing[first:] + missing[:first]:
            entries[name] = self._parse(files[name])
        if entries != known:
            text = json.dumps({name: asdict(entries[name]) for name in sorted(entries)}, indent=0)
            write_text(index, text)
            skipped = "".join(f"{name}: {entry.why}\n" for name, entry in sorted(entries.items()) if entry.why)
            write_text(self.list_of_skipped, skipped)
        return entries

    def _holds(self, file: Path, entry: Entry) -> bool:
        """Return whether the entry is up to date and the parsed file exists."""
        try:
            stat = file.stat()
        except OSError:
            return False
        same = (stat.st_size, stat.st_mtime_ns) == (entry.size, entry.changed)
        return same and (bool(entry.why) or self._parsed(entry.content).is_file())

    def _parsed(self, content: str) -> Path:
        return self.cache / f"{content}.safetensors"

    def _parse(self, file: Path) -> Entry:
        if kind := special_kind(file):
            return Entry(0, 0, "", why=f"is {kind}, not a file")
        stat = file.stat()
        try:
            content = hashlib.sha256(file.read_bytes()).hexdigest()[:32]
        except OSError as error:
            return Entry(stat.st_size, stat.st_mtime_ns, "", why=f"cannot be read: {error.strerror}")
        stamp = stat.st_size, stat.st_mtime_ns, content
        parsed = self._parsed(content)
        try:
            if lengths := _lengths(parsed):
                return Entry(*stamp, lengths)
            chains = structures.read(file)
        except ValueError as error:
            return Entry(*stamp, why=str(error))
        tensors = {f"{k}.{name}": getattr(c, name).contiguous() for k, c in enumerate(chains) for name in ITEM}
        lengths = tuple(len(chain) for chain in chains)
        with replacing(parsed) as temporary:
            safetensors.torch.save_file(tensors, temporary)
        return Entry(*stamp, lengths)

    def load(self, i: int) -> dict[str, Tensor]:
        """The item of chain i."""
        chain = self.chains[i]
        parsed = self._parsed(self.entries[chain.file].content)
        try:
            return _load(parsed, chain.number)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError):
            parsed.unlink(missing_ok=True)  # damaged or deleted: parse it again
            entry = self._parse(self.folder / chain.file if self.folder.is_dir() else self.folder)
            if len(entry.lengths) <= chain.number:
                raise ValueError(f"{chain.file} has changed while it was used: {entry.why}; restart the run") from None
            return _load(parsed, chain.number)


def structure_files(folder: Path) -> dict[str, Path]:
    """Return PDB and mmCIF files by relative path: those in the folder and below but hidden ones, or a single file."""
    if folder.is_file():
        return {folder.name: folder} if folder.name.lower().endswith(structures.ENDINGS) else {}
    found = files_below([folder], structures.ENDINGS, special=True)[folder]
    return dict(sorted((path.relative_to(folder).as_posix(), path) for path in found))


def plain_name(file: str) -> str:
    """Return a file's name without folder and endings: 1abc of `pdb/ab/1abc.cif.gz`."""
    name = Path(file).name
    for ending in (".gz", ".pdb", ".ent", ".cif"):
        name = name[: -len(ending)] if name.lower().endswith(ending) else name
    return name


def hash_fraction(file: str) -> float:
    """Return a number in [0, 1) that depends on the file's plain name alone; it decides the split."""
    digest = hashlib.sha256(os.fsencode(plain_name(file).lower())).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _load(parsed: Path, number: int) -> dict[str, Tensor]:
    tensors = _tensors(parsed)
    item = {name: tensors[f"{number}.{name}"] for name in ITEM}
    if not all(torch.isfinite(tensor).all() for tensor in item.values()):
        raise ValueError(f"{parsed} holds values that are not finite")
    return item


def _tensors(parsed: Path) -> dict[str, Tensor]:
    """Return all tensors of a parsed file. Read here: safetensors opens no path that is not UTF-8."""
    with parsed.open("rb") as file:
        return safetensors.torch.load(file.read())


def _lengths(parsed: Path) -> tuple[int, ...]:
    """Return the lengths of the chains in a parsed file; none if it is missing or damaged."""
    try:
        tensors = _tensors(parsed)
    except (OSError, safetensors.SafetensorError):
        return ()
    chains = itertools.takewhile(tensors.__contains__, (f"{k}.residue" for k in itertools.count()))
    return tuple(len(tensors[name]) for name in chains)


def _read_index(path: Path) -> dict[str, Entry]:
    """Return the index of the last start; empty if it is missing or damaged."""
    try:
        listed = json.loads(path.read_text())
        return {name: Entry(**{**e, "lengths": tuple(e["lengths"])}) for name, e in listed.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
