"""Checkpoints, and what is logged."""

from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..source import asks
from ..trace import Rank, Record, Trace, where


def judge(trace: Trace) -> Iterator[Finding]:
    writers: dict[str, set[int]] = defaultdict(set)
    for rank, save in trace.all("save"):
        writers[save["path"]].add(rank.number)
    for _, save in trace.all("save"):
        if len(writers[save["path"]]) > 1:
            ranks = ", ".join(map(str, sorted(writers[save["path"]])))
            yield finding("several-writers", f"ranks {ranks} write the same file", where(save), save["path"])
        if save["prefixed"]:
            keys = ", ".join(k for k in save["keys"] if k.startswith("module."))
            yield finding("prefixed-checkpoint", "weights are saved with DDP's prefix", where(save), f"keys: {keys}")
    for rank in trace.ranks:
        yield from _in_place(rank)
    yield from _resume(trace)
    yield from _logs(trace)


def _in_place(rank: Rank) -> Iterator[Finding]:
    moved = {m["source"] for m in rank.of("move")}
    times: dict[str, list[Record]] = defaultdict(list)
    for save in rank.of("save"):
        times[save["path"]].append(save)
    for path, saves in times.items():
        if path not in moved and any(s["existed"] for s in saves[1:]):
            what = "a checkpoint is overwritten in place"
            yield finding("in-place-checkpoint", what, where(saves[-1]), f"{path}, {len(saves)} times")


def _resume(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    files = {r["at"][0] for r in rank.records if r.get("at")}
    load = next((r for r in rank.of("load") if _goes_on(r, files)), None)
    if load is None:
        return
    end = rank.first("end")
    later = [r for r in rank.records if r["t"] >= load["t"]]
    restored = {r["what"] for r in later if r["kind"] == "restore"}
    steps = [r for r in later if r["kind"] == "step"]
    if steps and "optimizer" not in restored and "model" in restored:
        kept = "the file holds it" if load["optimizer"] else "the file does not hold it"
        what = "the run is resumed without the optimizer's state"
        yield finding("forgotten-optimizer", what, where(load), kept)
    if not rank.steps and end and end["how"] != "crash" and end["status"] == 0:
        what = "a checkpoint was loaded, no step was taken, and the script ended normally"
        yield finding("nothing-left-to-train", what, where(load), load["path"])


def _goes_on(load: Record, files: set[str]) -> bool:
    """Whether a file says how far training was and the script asks it: else it has weights to start from."""
    return bool(load["progress"]) and asks(files, load["progress"]) is not False


def _logs(trace: Trace) -> Iterator[Finding]:
    tables = [{(r["tag"], str(r["step"]), r["folder"]): r for r in rank.of("scalar")} for rank in trace.ranks]
    for key, record in tables[0].items():
        values = {number: t[key]["value"] for number, t in enumerate(tables) if key in t}
        if len(set(map(repr, values.values()))) > 1:
            seen = ", ".join(f"rank {n}: {v:g}" for n, v in values.items())
            what = f"ranks log different values as {key[0]!r}"
            yield finding("differing-logs", what, where(record), f"step {key[1]}: {seen}")
            return
