"""`lockstep bisect RUN_A RUN_B`: compare two runs; where they part, and why.

It compares their settings, launches (code, versions, hardware, data), logged values and histories. Between the last
step at which two exact runs are the same and the first at which they are not, it replays both, each from a checkpoint
of its own, and names the first tensor that differs.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from .. import distributed, launch
from ..options import BisectFlags
from ..parting import (
    Curves,
    Differences,
    Parting,
    Record,
    causes,
    curves,
    differing,
    first_difference,
    first_loss_difference,
    first_tensor,
    same_intervals,
)
from ..plots import Points, draw, finite
from ..replay import Replay
from ..watch.drift import checksums
from .replay import open_run, run_at

RANK_OF = "--rank_of"
"""How this command starts itself as a rank of a replay."""
_MAX_ROWS = 12
"""Of the table of logged values; a run may log one for each class."""


def run(words: list[str]) -> int:
    """Exit status 1 if the runs part."""
    if words[:1] == [RANK_OF]:
        return _worker(Path(words[1]))
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise ValueError("say which runs: lockstep bisect RUN_A RUN_B [flags]")
    use = tyro.cli(BisectFlags, args=words[2:], prog="lockstep bisect RUN_A RUN_B", use_underscores=True)
    a, b = (Record.read(run_at(Path(word))) for word in words[:2])
    if a.folder.resolve() == b.folder.resolve():
        raise ValueError(f"{a.folder} and {b.folder} are the same run")
    losses = curves(a.losses(), b.losses()) if same_intervals(a, b) else None
    parting = first_difference(a.history, b.history) or first_loss_difference(losses, a.history, b.history)
    differences = differing(a, b, parting.step if parting else sys.maxsize)
    _print_differences(a, b, differences)
    _print_values(a, b)
    if use.plot:
        _plot(a, b, Path(use.plot))
    _print_curves(losses, same_intervals(a, b))
    if not a.history or not b.history:
        which = " and ".join(str(r.folder) for r in (a, b) if not r.history)
        print(f"no history in {which}: only exact runs have one, so steps are compared by their logged loss alone")
        return 1 if losses and losses.first else 0
    if parting is None:
        steps = sorted(a.history.keys() & b.history.keys())
        print(f"the histories are the same at all {len(steps)} steps that both have recorded: {_ends(steps)}")
        return 0
    _print_parting(parting)
    reproduced = _replay(a, b, parting, use) if use.replay else None
    print(causes(differences, reproduced))
    return 1


def _ends(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "there is none"


def _print_differences(a: Record, b: Record, differences: Differences) -> None:
    print(f"A = {a.folder}\nB = {b.folder}")
    for problem in filter(None, (a.problem, b.problem)):
        print(f"  note: {problem}")
    for name, record in (("A", a), ("B", b)):
        if record.began:
            print(f"  {name} branched off from another run after step {record.began}")
    for group, found in differences.items():
        for name, (one, other) in found.items():
            print(f"  {group}: {name} is {one} in A, {other} in B")
    if not differences:
        print("  settings, data, code, versions, hardware and world are the same")


def _print_values(a: Record, b: Record) -> None:
    """Print the last, lowest and highest of each value that both have logged."""
    pairs = _logged_by_both(a, b)
    ends = [max((max(points) for points in both), default=0) for both in zip(*pairs.values(), strict=True)]
    table = Table(title="logged values: A up to step {}, B up to step {}".format(*ends or (0, 0)), title_justify="left")
    table.add_column("")
    for what in ("last", "lowest", "highest"):
        for run in ("A", "B"):
            table.add_column(f"{what} in {run}", justify="right")
    for name, both in list(pairs.items())[:_MAX_ROWS]:
        last = [points[max(points)] for points in both]
        lowest, highest = ([extreme(points.values()) for points in both] for extreme in (min, max))
        table.add_row(name, *(f"{value:.5g}" for value in (*last, *lowest, *highest)))
    if pairs:
        Console(width=110).print(table)
    if len(pairs) > _MAX_ROWS:
        print(f"and {len(pairs) - _MAX_ROWS} more values in metrics.jsonl")


def _logged_by_both(a: Record, b: Record) -> dict[str, tuple[Points, Points]]:
    one, other = finite(a.metrics), finite(b.metrics)
    return {name: (one[name], other[name]) for name in one if name in other}


def _plot(a: Record, b: Record, path: Path) -> None:
    panels = {name: {"A": one, "B": other} for name, (one, other) in _logged_by_both(a, b).items()}
    if not panels:
        raise ValueError(f"--plot {path}: there is no value that both runs have logged")
    try:
        draw(panels, path)
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'lockstep-train[plots]'") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another --plot") from None
    print(path)


def _print_curves(losses: Curves | None, same_steps: bool) -> None:
    """Print how far the logged losses are apart."""
    if not same_steps:
        print("the logged losses cannot be compared: they are means over different numbers of steps (log_every)")
    elif losses is None:
        print("no step at which both have logged a loss")
    elif losses.first is None:
        print(f"the logged losses are the same at all {losses.count} steps that both have logged")
    else:
        print(
            f"the logged losses first differ at step {losses.first}; the largest difference is {losses.largest:.3g}, "
            f"at step {losses.at}"
        )


def _print_parting(parting: Parting) -> None:
    before = "no earlier step is in both histories" if parting.same is None else f"the same up to step {parting.same}"
    print(f"the runs part at step {parting.step}: {', '.join(parting.fields)} ({before})")


def _replay(a: Record, b: Record, parting: Parting, use: BisectFlags) -> bool | None:
    """Print the first step and tensor that differ; return whether the difference shows in replays on this machine."""
    same = max(a.began, b.began) if parting.same is None else parting.same
    with tempfile.TemporaryDirectory(prefix="lockstep-bisect-") as parent:
        found: list[dict[str, Any]] = []
        for record in (a, b):
            print(f"replaying {record.folder} up to step {parting.step} ...", flush=True)
            folder = Path(parent) / str(len(found))
            folder.mkdir()
            task = {**asdict(use), "run": str(record.folder), "same": same, "step": parting.step}
            (folder / "task.json").write_text(json.dumps(task))
            nproc = launch.process_count(use.nproc, use.device or "auto")
            if launch.start(nproc, ["-m", "lockstep", "bisect", RANK_OF, str(folder)]):
                print(f"{record.folder} cannot be replayed here (see above)")
                return None
            found.append(json.loads((folder / "steps.json").read_text()))
    for record, replayed in zip((a, b), found, strict=True):
        if not replayed["agrees"]:
            print(f"a replay of {record.folder} does not give what it has recorded of step {parting.step}")
    if (first := first_tensor(found[0]["steps"], found[1]["steps"])) is None:
        print(f"replayed here, both give the same up to step {parting.step}")
        return False
    step, kind, name, count = first
    print(f"replayed here, they part at step {step}: first in the {kind} of {name} ({count} tensor(s) differ in it)")
    return True


def _worker(folder: Path) -> int:
    """Replay one run as one rank, and write the checksums of all tensors, step by step."""
    task = json.loads((folder / "task.json").read_text())
    os.environ.pop("LOCKSTEP_SMOKE", None)
    path, same, last = Path(task["run"]), task["same"], task["step"]
    run = open_run(path, task["recipe"], last, task["device"])
    hardware, starts = run.request.train.hardware, run.launches(same + 1, last)
    steps, agrees = dict[int, dict[str, dict[str, int]]](), True
    with distributed.session(hardware.device, hardware.timeout) as world:
        for start, end in zip(starts, [*(step - 1 for step in starts[1:]), last], strict=True):
            replay = Replay(open_run(path, task["recipe"], start, task["device"]), start, world, folder)
            replay.advance(start - 1)
            if start == same + 1:
                steps[same] = {"weights": checksums(replay.trainer.model.state_dict())}
            replay.advance(end)
            if world.is_main:
                steps |= {
                    step: {"gradient": redone.digested.gradient, "weights": redone.digested.weights}
                    for step, redone in replay.redone.items()
                    if redone.digested is not None and step >= start
                }
                agrees = end != last or last == 0 or not replay.differences(last)
            replay.trainer.step.close()
            del replay
    if world.is_main:
        (folder / "steps.json").write_text(json.dumps({"agrees": agrees, "steps": steps}))
    return 0
