"""The folder of a run: its name, what is in it, and which checkpoint to resume from.

runs/<recipe>/<date-time>/      receipt.json, config.yaml, metrics.jsonl, log.txt, checkpoints/, samples/, ...
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from . import checkpoint
from .config import Run
from .distributed import World
from .files import TEMPORARY, make_folder
from .processes import start_time
from .recipe import Recipe
from .registry import spec_of
from .runlock import RunLock

RUNS = Path("runs")
"""Where runs go, each recipe's in a folder of its own."""

LaunchId = tuple[str, str]
"""The torchrun agent that started a process, and the process: the first outlives the second."""
Warn = Callable[[str], None]


@dataclass
class RunDir:
    """The folder of a run, and the checkpoint it resumes from."""

    path: Path
    resume_from: Path | None = None
    global_batch: int | None = None
    """That of an earlier launch of this run which was restarted before its first checkpoint."""
    tiles: int | None = None
    """The tiles of an exact run, likewise: they do not follow from the number of ranks of this launch."""
    notes: list[str] = field(default_factory=list)
    """For the receipt."""
    launch_ids: list[LaunchId] = field(default_factory=list)
    """One for each rank: a restart is recognised by them."""

    @property
    def resumes_own_run(self) -> bool:
        """Return whether the checkpoint is one of this folder, not of a run that this one branches off from."""
        return self.resume_from is not None and self.path.resolve() in self.resume_from.resolve().parents


@contextmanager
def open_run_dir(run: Run, name: str, world: World) -> Iterator[RunDir]:
    """Yield the folder of a run, locked: another run in the same folder is an error on every rank."""
    run_dir = resolve_run_dir(run, name, world)
    lock, before = RunLock(run_dir.path), _checkpoints(run_dir.path)
    world.on_main(lock.acquire)
    try:
        if world.on_main(lambda: _checkpoints(run_dir.path) != before):
            raise ValueError(f"another run has just written to {run_dir.path}; start again")
        if world.is_main:
            _remove_unfinished(run_dir.path)
        yield run_dir
    finally:
        lock.release()


def _remove_unfinished(folder: Path) -> None:
    """Remove files that a killed process was writing beside those they were to replace."""
    for path in (*folder.glob(".*.tmp"), *folder.glob("samples/.*.tmp")):
        if (found := TEMPORARY.fullmatch(path.name)) and start_time(int(found[1])) is None:
            with suppress(OSError):
                path.unlink()


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def resolve_run_dir(run: Run, name: str, world: World) -> RunDir:
    """Choose and create the folder of a run of the recipe `name`, and choose the checkpoint to resume from.

    Rank 0 chooses for all; a ValueError is raised on every rank.
    """
    launch_ids = [launch_id for launch_id in world.gather(_launch_id()) if launch_id]
    run_dir: RunDir = world.on_main(lambda: _choose(run, RUNS / name, launch_ids))
    return run_dir


def _choose(run: Run, runs: Path, launch_ids: list[LaunchId]) -> RunDir:
    out = Path(run.out) if run.out else None
    notes: list[str] = []
    if restarted := _restarted_run(launch_ids, out, runs):
        run_dir = _resume_newest("auto", restarted, runs, notes.append)
        receipt = read_receipt(restarted)
        run_dir.global_batch, run_dir.tiles = receipt["global_batch"], receipt.get("tiles")
        notes.append("the processes of this run were restarted")
    elif run.resume is None:
        folder = out or _new_folder(runs)
        if holds_run(folder):
            raise ValueError(f"{folder} holds a run already; go on with it by --resume auto, or choose another --out")
        run_dir = RunDir(folder)
    elif run.resume in ("auto", "latest"):
        run_dir = _resume_newest(run.resume, out or newest_run(runs), runs, notes.append)
    else:
        run_dir = _resume_path(Path(run.resume), out, runs, notes.append)
    run_dir.notes, run_dir.launch_ids = notes, launch_ids
    _create(run_dir.path)
    return run_dir


def _launch_id() -> LaunchId | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent, worker = (f"{socket.gethostname()}/{pid}/{start_time(pid)}" for pid in (os.getppid(), os.getpid()))
    return agent, worker


def _restarted_run(launch_ids: list[LaunchId], out: Path | None, runs: Path) -> Path | None:
    """Return the folder of this very run, if one of our agents has started it before in other processes than these."""
    agents, workers = ({launch_id[i] for launch_id in launch_ids} for i in (0, 1))
    for receipt in [out / "receipt.json"] if out else sorted(runs.glob("*/receipt.json"), reverse=True):
        before = read_receipt(receipt.parent).get("launch_ids", [])
        if agents & {agent for agent, _ in before} and not workers & {worker for _, worker in before}:
            return receipt.parent
    return None


def read_receipt(folder: Path) -> dict[str, Any]:
    """Return the content of a run's receipt; nothing for one that is missing or damaged."""
    try:
        content = json.loads((folder / "receipt.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def first_launch(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of the launch that began a run; nothing for a receipt that has none."""
    launches = receipt.get("launches") or [{}]
    return dict(launches[0])


def launch_of(receipt: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the facts of the launch that made `step`; nothing for a receipt that has none."""
    made = (launch for launch in reversed(receipt.get("launches", [])) if launch["step"] < step)
    return dict(next(made, first_launch(receipt)))


def holds_run(folder: Path) -> bool:
    return (folder / "receipt.json").exists() or any((folder / "checkpoints").glob("step-*"))


def newest_run(runs: Path) -> Path | None:
    """Return the run under `runs` that was changed last, of those with a checkpoint."""
    found = [p.parent for p in runs.glob("*/checkpoints") if any(p.glob("step-*"))]
    return max(found, key=lambda p: p.stat().st_mtime) if found else None


def newest_of_all() -> Path | None:
    """Return the run that was started last, of any recipe."""
    receipts = sorted(RUNS.glob("*/*/receipt.json"), key=lambda path: path.stat().st_mtime)
    return receipts[-1].parent if receipts else None


def run_folder(path: Path) -> Path:
    """Return the folder of the run that `path` is, or is a part of."""
    found = checkpoint.resolve(path)
    folder = found.parent.parent if checkpoint.is_checkpoint(found) else found.parent
    if not (folder / "receipt.json").is_file():
        raise ValueError(f"{folder} is not a run's folder: it has no receipt.json")
    return folder


def find_config(resume: str, out: str | None, recipe: type[Recipe]) -> Path | None:
    """Return the config.yaml of the run that `--resume` names; None if there is no such run."""
    newest = Path(out) if out else newest_run(RUNS / recipe.name)
    resumed = newest if resume in ("auto", "latest") else Path(resume)
    for folder in (resumed, *list(resumed.parents)[:2]) if resumed else ():
        if (folder / "receipt.json").is_file():
            _check_recipe(folder, recipe)
            if not (folder / "config.yaml").is_file():
                raise ValueError(f"{folder} has lost its config.yaml; `settings` in its receipt.json is what it held")
            return folder / "config.yaml"
    return None


def _check_recipe(folder: Path, recipe: type[Recipe]) -> None:
    """Raise a ValueError if the run is one of another recipe, by name and by where it is found."""
    receipt = read_receipt(folder)
    recorded = str(receipt.get("recipe", "")).partition(": ")[0]
    if recorded not in ("", recipe.name) and receipt.get("spec") != spec_of(recipe):
        raise ValueError(
            f"{folder} is a run of the recipe {recorded}, not of {recipe.name}; it goes on with: lockstep train "
            f"--resume {folder}. (The same recipe under another name: name = {recorded!r} in its class)"
        )


def _resume_newest(how: str, folder: Path | None, runs: Path, warn: Warn) -> RunDir:
    found = checkpoint.newest(folder / "checkpoints", warn) if folder else None
    if found is None and (how == "latest" or (folder and any((folder / "checkpoints").glob("step-*")))):
        raise ValueError(f"there is no good checkpoint in {folder or runs}; to start anew choose another --out")
    return RunDir(folder or _new_folder(runs), found.path if found else None)


def _resume_path(path: Path, out: Path | None, runs: Path, warn: Warn) -> RunDir:
    found = checkpoint.resolve(path)
    checkpoints = found if not checkpoint.is_checkpoint(found) else found.parent
    newest = checkpoint.newest(checkpoints, warn)
    if newest is None and checkpoints == found:
        raise ValueError(f"there is no good checkpoint in {found}")
    resume_from = newest.path if newest and checkpoints == found else found
    own_folder = checkpoints.parent
    is_newest = newest is not None and resume_from.resolve() == newest.path.resolve()
    if is_newest and (out is None or out.resolve() == own_folder.resolve()):
        return RunDir(own_folder, resume_from)
    if out is not None and holds_run(out):
        raise ValueError(f"{out} holds a run already; to branch off from {resume_from} choose another --out")
    # From the middle of a run: a new folder, so that the rest of the old run stays.
    return RunDir(out or _new_folder(runs), resume_from)


def _new_folder(runs: Path) -> Path:
    """Create a folder named after this moment."""
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for folder in (runs / name, *(runs / f"{name}-{n}" for n in range(2, 1000))):
        try:
            make_folder(folder, exist_ok=False)
            return folder
        except FileExistsError:
            continue
        except OSError:  # `_create` says why
            return folder
    raise ValueError(f"{runs} holds a thousand runs of this second; name another folder with --out")


def _create(folder: Path) -> None:
    """Create the folder; a folder that cannot be written fails now, not at the first checkpoint."""
    try:
        make_folder(folder / "checkpoints")
        test_file = folder / ".writable"
        test_file.write_text("")
        test_file.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
