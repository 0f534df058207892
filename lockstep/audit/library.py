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

_TIMEOUT = timedelta(seconds=120)
_calls = 0


@dataclass
class Watched:
    """The result of `watch`, filled in when its `with` ends."""

    findings: list[Finding] = field(default_factory=list)
    """The same on every rank."""
    blind: list[str] = field(default_factory=list)
    """Probes that failed, with the error: what they check was not checked."""


@contextmanager
def watch(raises: bool = True) -> Iterator[Watched]:
    """Audit this rank in the body of a `with`; at its end every rank has the findings of all.

    Errors raise `OutOfLockstep` on every rank, unless `raises` is off; the yielded object holds all findings.
    Ranks exchange their records through the key-value store of the process group, never through its collectives.
    """
    global _calls
    _calls += 1
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():  # torch.multiprocessing sets no environment variables
        rank, world = dist.get_rank(), dist.get_world_size()
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="lockstep-watch-", ignore_cleanup_errors=True) as folder:  # workers write
        recorder = Recorder(Path(folder), rank)
        patches = probes.install(recorder)
        probes.keep_store(patches)
        recorder.write(Start({}))
        try:
            yield watched
            recorder.write(End(0))
        except BaseException as error:
            recorder.write(End(1, f"{type(error).__name__}: {error}"[:2000]))
            raise
        finally:  # also after an error: the other ranks must not wait for this one
            patches.undo()
            recorder.file.close()
            files = {path.name: path.read_text() for path in recorder.folder.glob("*.jsonl")}  # workers have their own
            store = dist.PrefixStore(f"lockstep-watch/{_calls}", patches.store) if patches.store is not None else None
            if store is not None:
                store.set(str(rank), zlib.compress(json.dumps(files).encode()))  # type: ignore[arg-type]
        trace = Trace(_gather(files, rank, world, store))
        watched.findings, watched.blind = judge(trace), trace.failed_probes
    errors = [f"{f.kind.name} at {f.at}: {f.what}" for f in watched.findings if f.severity == "error"]
    if errors and raises:
        raise OutOfLockstep("; ".join(errors))
    for failure in watched.blind:
        warnings.warn(f"a probe failed, so what it checks was not checked ({failure})", stacklevel=3)


def _gather(files: dict[str, str], rank: int, world: int, store: dist.Store | None) -> list[Rank]:
    """Return the records of all ranks, on every rank: each judges them, with the same result."""
    files_of = {rank: files}
    if world > 1 and store is not None:
        for other in range(world):
            store.wait([str(other)], _TIMEOUT)
            files_of[other] = json.loads(zlib.decompress(store.get(str(other))))
        store.set(f"{rank} has read", "")
        if rank == 0:  # this process may host the store, which ends with it
            store.wait([f"{other} has read" for other in range(world)], _TIMEOUT)
    return [rank_of(number, texts, 0) for number, texts in sorted(files_of.items())]


def assert_in_lockstep(
    train: Callable[[], object], nproc: int = 2, steps: int = 0, allow: tuple[str, ...] = (), patience: float = 30
) -> None:
    """For tests: audit `train` on `nproc` ranks; AssertionError for errors and warnings not in `allow`.

    A probe that failed is an error too, unless "blind" is in `allow`.
    `train` is a module-level function without arguments; each rank calls it in a new process.
    """
    file = inspect.getsourcefile(train)
    if file is None or not train.__qualname__.isidentifier():
        problem = f"{train.__qualname__} is not a module-level function of a file, so other processes cannot call it"
        raise ValueError(f"{problem}; define it at the top level of a file")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "audit.json"
        flags = ["--nproc", str(nproc), "--steps", str(steps), "--patience", str(patience), "--json", str(result)]
        script = ["-m", "lockstep.audit.call", str(Path(file).resolve()), train.__qualname__]
        command = [sys.executable, "-m", "lockstep", "audit", *flags, "--", *script]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        audit = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not result.exists():
            raise RuntimeError(f"the audit did not run: {audit.stderr or audit.stdout}")
        verdict = json.loads(result.read_text())
    wrong = [f for f in verdict["findings"] if f["severity"] != "note" and f["name"] not in allow]
    blind = verdict["blind"] if "blind" not in allow else []
    assert not wrong and not blind, "\n" + audit.stdout
