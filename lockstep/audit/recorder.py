"""The file of one rank: events as lines of JSON, written while the script runs and read when it has ended.

A line is written when the event happens, so that it is not lost if the rank hangs or is killed later. Ranks write
files of their own and exchange nothing: the script's process group is not used.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .events import KINDS, Event, Return
from .source import Site, user_line

_JSON = json.JSONEncoder(default=str)
_NAMES = {name: tuple(f.name for f in fields(kind)) for name, kind in KINDS.items()}
_VALUES = {name: attrgetter(*names) for name, names in _NAMES.items()}


class Recorder:
    """Writes one rank's file. A loader worker that inherits it writes to a file of its own."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.on_gpu = False  # whether the script uses a GPU, or a CPU that stands for one: then waits for it matter
        self.owner = os.getpid()
        self.hidden = threading.local()
        self._open(f"rank{rank}.jsonl")

    def _open(self, name: str) -> None:
        self.pid = os.getpid()
        self.file = (self.folder / name).open("a", buffering=1)

    def write(self, event: Event) -> None:
        """Add the time and, if it has none, the user's line, and write it."""
        if self.pid != os.getpid():
            self._open(f"rank{self.rank}.worker{os.getpid()}.jsonl")
        event.t = time.time()
        if event.at is None:
            event.at = user_line()
        self.file.write(encode(event) + "\n")

    @contextmanager
    def call(self, event: Event) -> Iterator[None]:
        """Record what is entered here, and that it is left at the end, also by an exception."""
        self.write(event)
        try:
            yield
        finally:
            self.write(Return())

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


def encode(event: Event) -> str:
    """The line of an event: its kind and the values of its fields, in their order."""
    kind = type(event).__name__
    return _JSON.encode((kind, *_VALUES[kind](event)))


def decode(text: str) -> list[Event]:
    """The events of a file, without values of unknown fields and without a line that was cut off when its process
    ended."""
    events = []
    for line in text.splitlines():
        try:
            kind, *values = json.loads(line)
            event = KINDS[kind](**dict(zip(_NAMES[kind], values, strict=False)))
        except (ValueError, KeyError, TypeError):
            continue
        event.at = Site(*event.at) if event.at else None
        events.append(event)
    return events


def packed(hashes: NDArray[np.uint64]) -> str:
    """Many numbers as a string, which is shorter and faster than a list in JSON."""
    return hashes.tobytes().hex()


def unpacked(text: str) -> list[int]:
    return np.frombuffer(bytes.fromhex(text), np.uint64).tolist()
