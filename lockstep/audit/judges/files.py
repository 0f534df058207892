"""Checkpoints, and what is logged."""

from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import End, Load, LoadStateDict, Move, Save, Scalar, Step
from ..model import Rank, Trace
from ..source import reads_entry


def judge(trace: Trace) -> Iterator[Finding]:
    writers: dict[str, set[int]] = defaultdict(set)
    for rank, save in trace.all(Save):
        writers[save.path].add(rank.number)
    for _, save in trace.all(Save):
        if len(writers[save.path]) > 1:
            ranks = ", ".join(map(str, sorted(writers[save.path])))
            yield finding("several-writers", f"ranks {ranks} write the same file", save.at, save.path)
        if save.prefixed:
            keys = ", ".join(k for k in save.keys if k.startswith("module."))
            yield finding("prefixed-checkpoint", "weights are saved with DDP's prefix", save.at, f"keys: {keys}")
    for rank in trace.ranks:
        yield from _in_place(rank)
    yield from _resume(trace.ranks[0])
    yield from _logs(trace)


def _in_place(rank: Rank) -> Iterator[Finding]:
    moved = {move.source for move in rank.of(Move)}
    by_path: dict[str, list[Save]] = defaultdict(list)
    for save in rank.of(Save):
        by_path[save.path].append(save)
    for path, saves in by_path.items():
        if path not in moved and any(s.existed for s in saves[1:]):
            what = "a checkpoint is overwritten in place"
            yield finding("in-place-checkpoint", what, saves[-1].at, f"{path}, {len(saves)} times")


def _resume(rank: Rank) -> Iterator[Finding]:
    files = {event.at.file for event in rank.events if event.at}
    # one that does not say how far training was, or whose script does not read that, only has weights
    resuming = (load for load in rank.of(Load) if load.progress and reads_entry(files, load.progress) is not False)
    load = next(resuming, None)
    if load is None:
        return
    restored = {event.target for event in rank.of(LoadStateDict) if event.t >= load.t}
    stepped = any(step.t >= load.t for step in rank.of(Step))
    if stepped and "optimizer" not in restored and "model" in restored:
        seen = "the file holds it" if load.has_optimizer else "the file does not hold it"
        yield finding("forgotten-optimizer", "the run is resumed without the optimizer's state", load.at, seen)
    end = rank.first(End)
    if not rank.steps and end and end.ok:
        what = "a checkpoint was loaded, no step was taken, and the script ended normally"
        yield finding("nothing-left-to-train", what, load.at, load.path)


def _logs(trace: Trace) -> Iterator[Finding]:
    tables = [{(s.tag, str(s.step), s.folder): s for s in rank.of(Scalar)} for rank in trace.ranks]
    for key, scalar in tables[0].items():
        values = {number: table[key].value for number, table in enumerate(tables) if key in table}
        if len(set(map(repr, values.values()))) > 1:
            seen = ", ".join(f"rank {n}: {value:g}" for n, value in values.items())
            what = f"ranks log different values as {scalar.tag!r}"
            yield finding("differing-logs", what, scalar.at, f"step {key[1]}: {seen}")
            return
