"""One rank of an audit: the script, unmodified, with the probes installed before its first line."""

import atexit
import ctypes
import faulthandler
import importlib.util
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from . import frameworks, mapping, probes, sharing
from .events import End, Start, StepLimit
from .recorder import Recorder
from .source import Site, declared_flag, foreign

_exit = os._exit
_DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
DONE, GO = "done", "go"
"""Suffix of the file that says a rank is through, and the file that lets it end."""


@dataclass(frozen=True)
class Order:
    """What to start, and how."""

    words: list[str]
    """The script and its flags, or -m and a module."""
    nproc: int = 2
    steps: int = 20
    """Optimizer steps after which a rank is through; 0: when the script ends."""
    mapped: bool = True
    """CUDA onto the CPU."""
    shares_gpu: bool = False
    """All ranks on one real GPU."""


def live(order: Order, rank: int, port: int, folder: Path) -> NoReturn:
    """Be rank `rank` of the audited script; called in a process that was forked for it."""
    os.setsid()
    with suppress(AttributeError):  # Linux's: killed, the audit leaves no ranks behind
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    atexit._clear()  # what the parent wants done at its end
    np.random.seed()  # as a process of its own would begin; Python's generator does so by itself
    torch.default_generator.seed()
    _environment(order, rank, port)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    output = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    stack = (folder / f"rank{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR2, stack, all_threads=True)
    recorder = Recorder(folder, rank)
    status = _run(order, recorder, folder)
    _through(recorder, folder, status)


def _environment(order: Order, rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order.nproc),
        LOCAL_WORLD_SIZE=str(order.nproc),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="lockstep-audit",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // order.nproc)))
    if order.shares_gpu:
        os.environ["NCCL_HOSTID"] = f"lockstep-audit-rank-{rank}"


def _run(order: Order, recorder: Recorder, folder: Path) -> int:
    patches = probes.Patches()
    if order.mapped:
        mapping.install(recorder, patches, order.nproc)
        frameworks.install(recorder, patches, order.nproc)
    if order.shares_gpu:
        sharing.install(recorder, patches, order.nproc)
    probes.start_ranks_here(patches, recorder)
    probes.install(recorder, order.steps, lambda: _enough(recorder, folder))
    patches.wrap(os, "_exit", lambda original: lambda status: _leave(recorder, folder, status))
    words = order.words
    recorder.write(Start(_settings(), order.shares_gpu))
    try:
        if words[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = [words[1], *_old_flag(words), *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [words[0], *_old_flag(words), *words[1:]]
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
        recorder.write(End("done", 0))
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            recorder.write(End("exit", end.code or 0))
            return end.code or 0
        os.write(2, f"{end.code}\n".encode())  # as Python does it
        recorder.write(End("exit", 1, str(end.code)[:2000] or "SystemExit", at=_last_line(end)))
        return 1
    except BaseException as error:
        sys.stdout.flush()
        os.write(2, traceback.format_exc().encode())  # the script may have silenced print on all ranks but one
        recorder.write(End("crash", 1, f"{type(error).__name__}: {error}"[:2000], at=_last_line(error)))
        return 1


def _old_flag(words: list[str]) -> list[str]:
    """--local_rank, as launchers once passed it and torch.distributed.launch does, for a script that declares it."""
    flags = ("--local_rank", "--local-rank")
    declared = declared_flag(_file(words), flags)
    given = any(word.startswith(flags) for word in words)
    return [f"{declared}={os.environ['LOCAL_RANK']}"] if declared and not given else []


def _file(words: list[str]) -> str:
    """Where the script is."""
    if words[0] != "-m":
        return words[0]
    with suppress(ImportError, ValueError):  # that there is no such module will be said by whoever runs it
        spec = importlib.util.find_spec(words[1])
        if spec and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{words[1]}.__main__")
        return spec.origin or "" if spec else ""
    return ""


def _settings() -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_", "WANDB_", "DDP_"))
    }


def _last_line(error: BaseException) -> Site | None:
    """The user's innermost line on the way to an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not foreign(f.filename)]
    return Site(frames[-1].filename, frames[-1].lineno or 0) if frames else None


def _leave(recorder: Recorder, folder: Path, status: int) -> NoReturn:
    """For `os._exit` of the script, but not of a process that it forked."""
    if recorder.in_worker:
        _exit(status)
    recorder.write(End("exit", status))
    _through(recorder, folder, status)


def _enough(recorder: Recorder, folder: Path) -> NoReturn:
    recorder.write(StepLimit())
    _through(recorder, folder, 0)


def _through(recorder: Recorder, folder: Path, status: int) -> NoReturn:
    """Stay until all are through: a rank that ends takes the connections of the others with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    recorder.file.flush()
    (folder / f"rank{recorder.rank}.{DONE}").write_text(str(status))
    while not (folder / GO).exists():
        time.sleep(0.02)
    _exit(status)
