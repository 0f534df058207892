"""Checkpoints, and what is logged."""

from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import Load, LoadStateDict, Move, Save, Scalar, Step
from ..model import Rank, Trace
from ..source import reads_entry


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
    # one that does not say how far training was, or whose script does not read that, only has weights
    resuming = (load for load in rank.of(Load) if load.progress and reads_entry(rank.files, load.progress) is not False)
    load = next(resuming, None)
    if load is None:
        return
    restored = {event.target for event in rank.of(LoadStateDict) if event.t >= load.t}
    stepped = any(step.t >= load.t for step in rank.of(Step))
    if stepped and "optimizer" not in restored and "model" in restored:
        seen = "the file holds it" if load.has_optimizer else "the file does not hold it"
        yield finding("forgotten-optimizer", "the run is resumed without the optimizer's state", load.at, seen)
    if not rank.steps and rank.end and rank.end.ok:
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
