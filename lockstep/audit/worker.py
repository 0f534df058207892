"""One rank of an audit: the script, unmodified, with the probes installed before its first line."""

import atexit
import ctypes
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from ..script import run_as_main
from . import probes
from .emulate import batches, cuda_on_cpu, frameworks, shared_gpu, spawn
from .events import End, Event, Start, StepLimit
from .patch import Patches
from .recorder import Recorder
from .source import Site, foreign

_exit = os._exit
_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent exits."""
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "WANDB_", "DDP_")
DONE, ALL_DONE = "done", "all_done"
"""Suffix of the file with the exit status of a rank that has finished; the file that lets the finished ranks exit."""


@dataclass(frozen=True)
class LaunchSpec:
    """The script to run, and the machine to run it on."""

    argv: list[str]  # the script and its flags, or -m and a module
    nproc: int = 2
    steps: int = 20  # optimizer steps after which a rank has finished; 0: when the script ends
    cuda_on_cpu: bool = True  # the CPU in place of GPUs
    shared_gpu: bool = False  # all ranks on one GPU
    in_detail: bool = False  # record each step in detail, to compare it with that of another run
    stop_at_save: int | None = None  # end before the first checkpoint after the one at this step or later
    folder: Path | None = None  # where the script runs; None: in the current folder
    seed: int | None = None  # of the generators before the first line of the script
    batch_factor: float = 1.0  # by which the batch size of each DataLoader is multiplied


def run_worker(spec: LaunchSpec, rank: int, port: int, folder: Path) -> NoReturn:
    """Run the script as rank `rank` and exit; called in a process that was forked for it."""
    os.setsid()
    with suppress(AttributeError):  # Linux only: a killed audit leaves no ranks behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    atexit._clear()  # the parent's handlers
    _seed(spec.seed)
    if spec.folder:
        os.chdir(spec.folder)
    _set_environment(spec, rank, port)
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
    _install(spec, recorder)
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    recorder.write(Start(settings, spec.shared_gpu))
    end = _run_script(spec.argv)
    _finish(recorder, end, end.status)


def _seed(seed: int | None) -> None:
    """Seed the generators: with None at random, as in a new process; Python's own does so by itself."""
    np.random.seed(seed)
    if seed is None:
        torch.default_generator.seed()
    else:
        random.seed(seed)
        torch.manual_seed(seed)


def _set_environment(spec: LaunchSpec, rank: int, port: int) -> None:
    """As torchrun does."""
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"GROUP_RANK": "0"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(spec.nproc))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "lockstep-audit", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.nproc)))
    if spec.shared_gpu:
        os.environ["NCCL_HOSTID"] = f"lockstep-audit-rank-{rank}"


def _install(spec: LaunchSpec, recorder: Recorder) -> None:
    patches = Patches()
    if spec.cuda_on_cpu:
        cuda_on_cpu.install(recorder, patches, spec.nproc)
        frameworks.install(recorder, patches, spec.nproc)
    if spec.shared_gpu:
        shared_gpu.install(recorder, patches, spec.nproc)
    spawn.install(recorder, patches)
    if spec.batch_factor != 1.0:
        batches.scale(patches, spec.batch_factor)
    probes.install(recorder, spec.steps, lambda: _finish(recorder, StepLimit(), 0), spec.in_detail, spec.stop_at_save)
    patches.wrap(os, "_exit", lambda _: partial(_exit_early, recorder))


def _run_script(argv: list[str]) -> End:
    """Return how the script ended."""
    try:
        run_as_main(argv)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return End(request.code or 0)
        os.write(2, f"{request.code}\n".encode())  # as Python does it
        return End(1, str(request.code)[:2000] or "SystemExit", at=_user_line(request))
    except BaseException as error:
        sys.stdout.flush()
        os.write(2, traceback.format_exc().encode())  # the script may have silenced print on all ranks but one
        return End(1, f"{type(error).__name__}: {error}"[:2000], at=_user_line(error))
    return End(0)


def _user_line(error: BaseException) -> Site | None:
    """Return the innermost line of the user's code in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not foreign(f.filename)]
    return Site(frames[-1].filename, frames[-1].lineno or 0) if frames else None


def _exit_early(recorder: Recorder, status: int) -> NoReturn:
    """Replace `os._exit` of the script; processes that it forked exit as usual."""
    if recorder.in_worker:
        _exit(status)
    _finish(recorder, End(status), status)


def _finish(recorder: Recorder, last: Event, status: int) -> NoReturn:
    """Report that this rank has finished, and exit when all have: an exit closes the connections of the others."""
    recorder.write(last)
    sys.stdout.flush()
    sys.stderr.flush()
    recorder.file.flush()
    (recorder.folder / f"rank{recorder.rank}.{DONE}").write_text(str(status))
    while not (recorder.folder / ALL_DONE).exists():
        time.sleep(0.02)
    _exit(status)
