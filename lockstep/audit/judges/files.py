"""Checkpoints, and what is logged."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..catalog import Finding, finding
from ..events import Load, LoadStateDict, Move, Save, Scalar, Step
from ..loaded import reads_entry
from ..model import Rank, Trace


def judge(trace: Trace) -> Iterator[Finding]:
    files: dict[str, dict[int, list[Save]]] = defaultdict(lambda: defaultdict(list))
    for rank, save in trace.all(Save):
        files[save.path][rank.number].append(save)
        if save.prefixed:
            keys = ", ".join(k for k in save.keys if k.startswith("module."))
            yield finding("prefixed-checkpoint", "weights are saved with DDP's prefix", save.at, f"keys: {keys}")
    moved = {(rank.number, move.source) for rank, move in trace.all(Move)}
    for path, writers in files.items():
        ranks = ", ".join(map(str, writers))
        for number, saves in writers.items():
            for save in saves if len(writers) > 1 else ():
                yield finding("several-writers", f"ranks {ranks} write the same file", save.at, path)
            if (number, path) not in moved and any(s.existed for s in saves[1:]):
                what, seen = "a checkpoint is overwritten in place", f"{path}, {len(saves)} times"
                yield finding("in-place-checkpoint", what, saves[-1].at, seen)
    yield from _resume(trace.ranks[0])
    yield from _logs(trace)


def _resume(rank: Rank) -> Iterator[Finding]:
    load = next((load for load in rank.of(Load) if _is_resumed_from(load, rank)), None)
    if load is None:
        return
    since = 0.0 if load.module == "json" else load.t  # weights and numbers are in two files, in any order
    restored = [event for event in rank.of(LoadStateDict) if event.t >= since]
    targets = {event.target for event in restored}
    stepped = [step for step in rank.of(Step) if step.t >= load.t]
    keeps_state = all(step.n > 1 for step in stepped) or any(step.keeps_state for step in stepped if step.n == 1)
    if stepped and keeps_state and "model" in targets:
        empty = [event for event in restored if event.empty]
        if "optimizer" not in targets:
            what = "the run is resumed without the optimizer's state"
            held = "the file holds it" if load.has_optimizer else "the file does not hold it"
            seen = held if load.module == "torch" else "the model's was loaded"
            yield finding("forgotten-optimizer", what, load.at, seen)
        elif len(empty) == sum(event.target == "optimizer" for event in restored):
            what = "the run is resumed with an optimizer whose state is empty"
            yield finding("forgotten-optimizer", what, empty[0].at, "load_state_dict was given no momenta")
    if not rank.steps and rank.end and rank.end.ok and load.module == "torch":
        what = "a checkpoint was loaded, no step was taken, and the script ended normally"
        yield finding("nothing-left-to-train", what, load.at, load.path)


def _is_resumed_from(load: Load, rank: Rank) -> bool:
    """Whether a file says how far training was, and the script reads that. Others only have weights, or settings."""
    if not load.progress or load.module == "dcp":  # which loads what it is asked for
        return bool(load.progress)
    if load.module == "torch":
        return reads_entry(rank.files, load.progress) is not False
    weights = [Path(other.path) for other in rank.of(Load) if other.module != "json" and other.path]
    beside = any(Path(load.path).parent in (path.parent, path) for path in weights) if load.path else bool(weights)
    return beside and reads_entry(rank.files, load.progress, "json") is True


def _logs(trace: Trace) -> Iterator[Finding]:
    tables = [{(s.tag, str(s.step), s.folder): s for s in rank.of(Scalar)} for rank in trace.ranks]
    for key, scalar in tables[0].items():
        values = {number: table[key].value for number, table in enumerate(tables) if key in table}
        if len(set(map(repr, values.values()))) > 1:
            seen = ", ".join(f"rank {n}: {value:g}" for n, value in values.items())
            what = f"ranks log different values as {scalar.tag!r}"
            yield finding("differing-logs", what, scalar.at, f"step {key[1]}: {seen}")
            return
