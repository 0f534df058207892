"""A run's folder, and the receipt: what is about to happen, in one table, before it happens."""

import json
import os
import socket
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from . import checkpoint
from .config import RUNS, Request, newest_run, write_whole
from .distributed import World
from .stream import Sizes


@dataclass
class Place:
    """Where a run lives, and the checkpoint it goes on from."""

    folder: Path
    start: Path | None = None
    global_batch: int | None = None
    """The one that an earlier start of this run had, before there was a checkpoint to tell."""
    remarks: list[str] = field(default_factory=list)
    starts: list[tuple[str, str]] = field(default_factory=list)
    """Of each rank, torchrun's agent and the process: by them a restart is known."""


def settle(request: Request, world: World) -> Place:
    """Choose the folder and the checkpoint to start from; what stands in the way is a ValueError on every rank."""
    starts = [start for start in world.gather(_start()) if start]
    place: Place = world.decide(lambda: _choose(request, starts))
    return place


def _choose(request: Request, starts: list[tuple[str, str]]) -> Place:
    run = request.train.run
    name = request.recipe.name
    remarks: list[str] = []
    if restarted := _restarted(starts, Path(run.out) if run.out else None, RUNS / name):
        place = _latest("auto", restarted, RUNS / name, remarks.append)
        place.global_batch = json.loads((restarted / "receipt.json").read_text())["global_batch"]
        remarks.append("the processes of this run were started again")
    elif run.resume is None:
        folder = Path(run.out) if run.out else _fresh(RUNS / name)
        if holds_a_run(folder):
            raise ValueError(f"{folder} holds a run already; go on with it by --resume auto, or choose another --out")
        place = Place(folder)
    elif run.resume in ("auto", "latest"):
        place = _latest(run.resume, Path(run.out) if run.out else newest_run(RUNS / name), RUNS / name, remarks.append)
    else:
        place = _from_path(Path(run.resume), Path(run.out) if run.out else None, RUNS / name, remarks.append)
    place.remarks, place.starts = remarks, starts
    _make(place.folder)
    return place


def _start() -> tuple[str, str] | None:
    """The torchrun agent that started this process, and the process: the first outlives the second."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent, worker = (f"{socket.gethostname()}/{pid}/{_begun(pid)}" for pid in (os.getppid(), os.getpid()))
    return agent, worker


def _begun(pid: int) -> str:
    """When a process began; by the kernel's ticks where there are any, which nobody sets like a clock."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else str(psutil.Process(pid).create_time())


def _restarted(starts: list[tuple[str, str]], out: Path | None, runs: Path) -> Path | None:
    """The folder of this very run: an agent among us has started it before, in other processes than these."""
    agents, workers = ({start[i] for start in starts} for i in (0, 1))
    for receipt in [out / "receipt.json"] if out else sorted(runs.glob("*/receipt.json"), reverse=True):
        before = json.loads(receipt.read_text()).get("starts", []) if receipt.is_file() else []
        if agents & {agent for agent, _ in before} and not workers & {worker for _, worker in before}:
            return receipt.parent
    return None


def holds_a_run(folder: Path) -> bool:
    return (folder / "receipt.json").exists() or any((folder / "checkpoints").glob("step-*"))


def _latest(how: str, folder: Path | None, runs: Path, report: Any) -> Place:
    found = checkpoint.newest(folder / "checkpoints", report) if folder else None
    if found is None and (how == "latest" or (folder and any((folder / "checkpoints").glob("step-*")))):
        raise ValueError(f"there is no good checkpoint in {folder or runs}; to start anew choose another --out")
    return Place(folder or _fresh(runs), found.path if found else None)


def _from_path(path: Path, out: Path | None, runs: Path, report: Any) -> Place:
    where = checkpoint.resolve(path)
    folder = where if not checkpoint.is_checkpoint(where) else where.parent
    newest = checkpoint.newest(folder, report)
    start = newest.path if newest and folder == where else where
    if newest is None and folder == where:
        raise ValueError(f"there is no good checkpoint in {where}")
    own = folder.parent
    if newest and start.resolve() == newest.path.resolve() and (out is None or out.resolve() == own.resolve()):
        return Place(own, newest.path)
    if out is not None and holds_a_run(out):
        raise ValueError(f"{out} holds a run already; to branch off from {start} choose another --out")
    return Place(out or _fresh(runs), start)  # from the middle of a run: a branch, so that the rest of it stays


def _fresh(runs: Path) -> Path:
    """A folder named after this moment that nobody has."""
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for folder in (runs / name, *(runs / f"{name}-{n}" for n in range(2, 1000))):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError:  # it will be said by whoever writes there
            return folder
    raise ValueError(f"{runs} holds a thousand runs of this second; name another folder with --out")


def _make(folder: Path) -> None:
    """Find out now, not at the first checkpoint, whether anything can be written."""
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None


@dataclass
class Receipt:
    """Rows of (what, value), and remarks: what the user gave that has no effect, what is not as it seems."""

    facts: dict[str, Any]
    """For programs: how the recipe is found again, the global batch, which launch this is."""
    rows: list[tuple[str, str]]
    remarks: list[str]

    def show(self) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title="receipt", title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 1000, highlight=False)
        console.print(table)
        for remark in self.remarks:
            console.print(f"  note: {remark}", markup=False)
        console.print()

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps({**self.facts, **dict(self.rows), "remarks": self.remarks}, indent=2) + "\n")


def devices(world: World) -> str:
    if world.device.type == "cuda":
        return f"{world.size} × {torch.cuda.get_device_name(world.device)}"
    return f"{world.size} CPU process{'es' if world.size > 1 else ''}, {torch.get_num_threads()} thread(s) each"


def without_effect(request: Request, world: World, sizes: Sizes, evaluates: bool, generates: bool) -> list[str]:
    """What the user gave that does nothing in this run, and what holds instead."""
    given, optim, run, hardware = request.given, request.train.optim, request.train.run, request.train.hardware
    rules = [
        ("momentum", optim.optimizer != "sgd", f"the optimizer is {optim.optimizer}"),
        ("beta1", optim.optimizer != "adamw", f"the optimizer is {optim.optimizer}"),
        ("beta2", optim.optimizer != "adamw", f"the optimizer is {optim.optimizer}"),
        ("base_batch_size", optim.lr_scaling == "none", "lr_scaling is none"),
        ("min_lr", optim.schedule not in ("cosine", "linear", "plateau"), f"the schedule is {optim.schedule}"),
        ("decay_steps", optim.schedule != "step", f"the schedule is {optim.schedule}"),
        ("decay_factor", optim.schedule not in ("step", "plateau"), f"the schedule is {optim.schedule}"),
        ("decay_patience", optim.schedule != "plateau", f"the schedule is {optim.schedule}"),
        ("max_restarts", "TORCHELASTIC_RUN_ID" not in os.environ, "there is one process, and no agent to restart it"),
        ("eval_every", not evaluates and run.eval_every != "0", "there is no validation set"),
        ("patience", not evaluates, "nothing is evaluated during training"),
        ("min_delta", not evaluates, "nothing is evaluated during training"),
        ("best_metric", not evaluates, "nothing is evaluated during training"),
        ("sample_every", not generates, "this recipe generates nothing"),
        ("wandb_project", not run.use_wandb, "use_wandb is off"),
        ("wandb_name", not run.use_wandb, "use_wandb is off"),
        ("logdir", not run.tensorboard, "tensorboard is off"),
        ("use_amp", hardware.use_amp and world.device.type == "cpu", "on a CPU it is slower; --precision bf16 insists"),
        ("world_size", hardware.world_size != world.size, f"the environment holds: {world.size}"),
        ("local_rank", hardware.local_rank != world.local_rank, f"the environment holds: {world.local_rank}"),
        ("dist_url", hardware.dist_url != "env://", "MASTER_ADDR and MASTER_PORT of the environment hold"),
        ("nproc", hardware.nproc not in ("auto", str(world.size)), f"this was started as {world.size} process(es)"),
    ]
    notes = [f"{name} has no effect: {why}" for name, idle, why in rules if name in given and idle]
    if request.smoke:
        notes.insert(0, f"LOCKSTEP_SMOKE={request.smoke}: a try-out of {sizes.n_steps} steps, micro-batch 2")
    if hardware.distributed and world.size == 1:
        notes.append("distributed training was asked for, but there is one process; start it with torchrun or --nproc")
    return notes
