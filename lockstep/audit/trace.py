"""What a rank did, as lines of a file: written while it runs, so that they are there also when it hangs or dies.

A record is one JSON object: `kind`, `t` (seconds), `at` (file, line of the user's code), and what the probe saw.
Ranks write to files of their own and never talk to each other: the script's process group stays its own.
"""

import importlib.machinery
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Record = dict[str, Any]
_TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = (sysconfig.get_paths()["stdlib"] + os.sep, sysconfig.get_paths()["purelib"] + os.sep, _TORCH, OURS)
SHARING = "lockstep-audit-rank-"
"""NCCL_HOSTID of ranks that the audit puts on one GPU begins so."""
_JSON = json.JSONEncoder(default=str)
_foreign: dict[str, bool] = {}
_own: set[str] = set()


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def foreign(file: str) -> bool:
    """Whether code in `file` is a library's and not the user's."""
    if file not in _foreign:
        library = file.startswith(("<", *_LIBRARIES)) or generated(file) or f"{os.sep}site-packages{os.sep}" in file
        _foreign[file] = library and (file.startswith(OURS) or not file.startswith(tuple(_own)))
    return _foreign[file]


def generated(file: str) -> bool:
    """Whether torch.compile wrote the code in `file`."""
    return "torchinductor_" in file or file.startswith(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "\0")


def claim(package: str | None) -> None:
    """Take the installed package of a module for the user's, and no other: it is what is audited. None: a script is."""
    _own.clear()
    _foreign.clear()
    if package is None:
        return
    if package.partition(".")[0] == "torch" or package == "lockstep.audit.call":  # they only start what is audited
        return
    spec = importlib.machinery.PathFinder.find_spec(package.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is not None:
        folders = [str(Path(place)) + os.sep for place in spec.submodule_search_locations or ()]
        _own.update(folders or [spec.origin or "?"])


def site(depth: int = 2) -> Site | None:
    """The innermost line of the user's code on the stack."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if not foreign(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class Recorder:
    """One rank's file. A worker process of a loader that inherits it writes to a file of its own."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.on_gpu = False
        """Whether the script works on a GPU, or believes to: waits for the device mean something there."""
        self.owner = os.getpid()
        self.hidden = threading.local()
        self._open()

    def _open(self) -> None:
        self.pid = os.getpid()
        name = f"rank{self.rank}.jsonl" if not hasattr(self, "file") else f"rank{self.rank}.worker{self.pid}.jsonl"
        self.file = (self.folder / name).open("a", buffering=1)

    def write(self, kind: str, at: Site | None = None, **seen: Any) -> None:
        """One record; `at` is the user's line, found on the stack if it is not given."""
        if self.pid != os.getpid():
            self._open()
        record = {"kind": kind, "t": time.time(), "at": at or site(3), **seen}
        self.file.write(_JSON.encode(record) + "\n")

    @property
    def in_worker(self) -> bool:
        return self.owner != os.getpid() or torch.utils.data.get_worker_info() is not None

    @property
    def is_hidden(self) -> bool:
        """Whether what runs now is a probe's own work or inside a call that was recorded as a whole."""
        return getattr(self.hidden, "depth", 0) > 0 or self.file.closed

    @contextmanager
    def hide(self) -> Iterator[None]:
        self.hidden.depth = getattr(self.hidden, "depth", 0) + 1
        try:
            yield
        finally:
            self.hidden.depth -= 1


class Rank:
    """The records of one rank, in order, and how its process ended."""

    def __init__(self, number: int, records: list[Record], workers: list[list[Record]], status: int | None):
        self.number, self.records, self.workers, self.status = number, records, workers, status
        self.stack: list[Site] = []
        """The user's lines it was in when it was found hanging, innermost first."""
        self.printed = ""
        """What it wrote to its standard output and error."""

    def of(self, kind: str) -> list[Record]:
        return [r for r in self.records if r["kind"] == kind]

    def first(self, kind: str) -> Record | None:
        return next((r for r in self.records if r["kind"] == kind), None)

    @property
    def failed(self) -> bool:
        """Whether its script did not come to an end of its own."""
        end = self.first("end")
        if end is None:
            return bool(self.status) and not self.first("enough")
        return end["how"] == "crash" or bool(end["status"])

    @property
    def steps(self) -> list[Record]:
        """Its optimizer steps; of several optimizers, of the one that took most."""
        steps = self.of("step")
        counts = {n: sum(s["optimizer"] == n for s in steps) for n in {s["optimizer"] for s in steps}}
        return [s for s in steps if s["optimizer"] == max(counts, key=lambda n: counts[n])] if counts else []


class Trace:
    """What all ranks did."""

    def __init__(self, ranks: list[Rank], hung: bool = False, over: bool = False):
        self.ranks, self.hung = ranks, hung
        self.over = over
        """Whether it was ended because it had taken as long as it may."""
        self.alone: Trace | None = None
        """The same script on one rank, where a check needed to compare."""

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def readers(self) -> "Trace":
        """Without ranks that are given the samples of another on purpose, since both hold parts of one layer."""
        groups = {rank.number: rank.first("tensor_parallel") for rank in self.ranks}
        first = [
            rank for rank in self.ranks if (group := groups[rank.number]) is None or rank.number == group["ranks"][0]
        ]
        if len(first) == self.world:
            return self
        readers = Trace(first, self.hung, self.over)
        readers.alone = self.alone
        return readers

    @property
    def blind(self) -> list[str]:
        """Probes that failed, and why they did so first: what they look at was not seen."""
        files = [lines for rank in self.ranks for lines in (rank.records, *rank.workers)]
        failures = [r for lines in files for r in lines if r["kind"] == "blind"]
        why = {r["probe"]: r["why"] for r in reversed(failures)}
        return [f"{probe}: {reason}" for probe, reason in sorted(why.items())]

    def all(self, kind: str) -> Iterator[tuple[Rank, Record]]:
        for rank in self.ranks:
            for record in rank.of(kind):
                yield rank, record


def packed(hashes: NDArray[np.uint64]) -> str:
    """Numbers as a record holds many of them, shorter and faster than in JSON."""
    return hashes.tobytes().hex()


def unpacked(text: str) -> list[int]:
    return np.frombuffer(bytes.fromhex(text), np.uint64).tolist()


def where(record: Record | None) -> Site | None:
    return Site(*record["at"]) if record and record.get("at") else None


def read(folder: Path, world: int, statuses: list[int | None]) -> list[Rank]:
    """The ranks' files in `folder`."""
    ranks = []
    for number in range(world):
        workers = [lines(_text(p)) for p in sorted(folder.glob(f"rank{number}.worker*.jsonl"))]
        ranks.append(Rank(number, lines(_text(folder / f"rank{number}.jsonl")), workers, statuses[number]))
    return ranks


def lines(text: str) -> list[Record]:
    """The records of a file. A last line that was cut off by the end of its process is left out."""
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
