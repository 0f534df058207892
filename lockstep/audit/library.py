"""The audit inside a script or a test of your own."""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..watch import OutOfLockstep
from . import probes
from .catalog import Finding
from .events import End, Start
from .judges import judge
from .model import Rank, Trace, rank_of
from .recorder import Recorder

_WAIT = timedelta(seconds=120)
_watches = 0


@dataclass
class Watched:
    """What `watch` found, there once it is over."""

    findings: list[Finding] = field(default_factory=list)
    """On every rank the same."""
    blind: list[str] = field(default_factory=list)
    """Probes that failed, and why: what they look at was not seen."""


@contextmanager
def watch(raises: bool = True) -> Iterator[Watched]:
    """Watch this rank in the body of a `with`; at its end all ranks hear what was wrong.

    Errors raise `OutOfLockstep` on every rank, unless `raises` is off; all that was found is in what `with` gives.
    What ranks compare goes through the key-value store of the process group, never through its collectives.
    """
    global _watches
    _watches += 1
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():  # ranks that torch.multiprocessing started have nothing in their environment
        rank, world = dist.get_rank(), dist.get_world_size()
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="lockstep-watch-", ignore_cleanup_errors=True) as folder:  # workers write
        recorder = Recorder(Path(folder), rank)
        patches = probes.install(recorder)
        probes.keep_store(patches)
        recorder.write(Start({}))
        try:
            yield watched
            recorder.write(End("done", 0))
        except BaseException as error:
            recorder.write(End("crash", 1, f"{type(error).__name__}: {error}"[:2000]))
            patches.undo()
            _send(_files(recorder), rank, _shared(patches.store))  # the others must not wait for it
            raise
        patches.undo()
        trace = Trace(_gather(_files(recorder), rank, world, _shared(patches.store)))
        watched.findings, watched.blind = judge(trace), trace.failed_probes
    errors = [f"{f.kind.name} at {f.at}: {f.what}" for f in watched.findings if f.severity == "error"]
    if errors and raises:
        raise OutOfLockstep("; ".join(errors))
    for failure in watched.blind:
        warnings.warn(f"a probe failed, and what it looks at was not seen ({failure})", stacklevel=3)


def _files(recorder: Recorder) -> dict[str, str]:
    recorder.file.close()
    return {p.name: p.read_text() for p in recorder.folder.glob("*.jsonl")}


def _shared(store: dist.Store | None) -> dist.Store | None:
    return dist.PrefixStore(f"lockstep-watch/{_watches}", store) if store is not None else None


def _send(files: dict[str, str], rank: int, store: dist.Store | None) -> None:
    if store is not None:
        store.set(str(rank), zlib.compress(json.dumps(files).encode()))  # type: ignore[arg-type]


def _gather(files: dict[str, str], rank: int, world: int, store: dist.Store | None) -> list[Rank]:
    """All ranks' records, on every rank: each judges for itself, and comes to the same result."""
    everyone = {rank: files}
    if world > 1 and store is not None:
        _send(files, rank, store)
        for other in range(world):
            store.wait([str(other)], _WAIT)
            everyone[other] = json.loads(zlib.decompress(store.get(str(other))))
        store.set(f"{rank} has read", "")
        if rank == 0:  # the store may be this process's own, and end with it
            store.wait([f"{other} has read" for other in range(world)], _WAIT)
    return [rank_of(number, texts, 0) for number, texts in sorted(everyone.items())]


def assert_in_lockstep(
    train: Callable[[], object], nproc: int = 2, steps: int = 0, allow: tuple[str, ...] = (), patience: float = 30
) -> None:
    """For tests: run `train` on `nproc` ranks under the audit; AssertionError for errors and warnings not in `allow`.

    So also for probes that failed, so that something was not seen, unless "blind" is in `allow`.
    `train` is a function at the top of a file, without arguments; each rank calls it in a fresh process.
    """
    file = inspect.getsourcefile(train)
    if file is None or not train.__qualname__.isidentifier():
        raise ValueError(f"{train.__qualname__} is not at the top of a file, so that other processes cannot call it")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "audit.json"
        flags = ["--nproc", str(nproc), "--steps", str(steps), "--patience", str(patience), "--json", str(found)]
        script = ["-m", "lockstep.audit.call", str(Path(file).resolve()), train.__qualname__]
        command = [sys.executable, "-m", "lockstep", "audit", *flags, "--", *script]
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
        if not found.exists():
            raise RuntimeError(f"the audit could not be run: {done.stderr or done.stdout}")
        verdict = json.loads(found.read_text())
    wrong = [f for f in verdict["findings"] if f["severity"] != "note" and f["name"] not in allow]
    blind = verdict["blind"] if "blind" not in allow else []
    assert not wrong and not blind, "\n" + done.stdout
