"""Noise, dropout and augmentation of different ranks are different."""

from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..trace import Record, Trace, where


def judge(trace: Trace) -> Iterator[Finding]:
    yield from _workers(trace)
    if trace.world == 1:
        return
    yield from _draws(trace)
    yield from _dropout(trace)
    yield from _augmentation(trace)


def _draws(trace: Trace) -> Iterator[Finding]:
    tables = [{(r["step"], r["n"], r["fn"], tuple(r["shape"])): r for r in rank.of("draw")} for rank in trace.ranks]
    shared = sorted(set.intersection(*(set(t) for t in tables)))
    equal = [key for key in shared if len({t[key]["sum"] for t in tables}) == 1]
    if equal and len(equal) >= max(1, len(shared) // 2):
        step, _, name, shape = equal[0]
        seen = f"torch.{name}{shape} in step {step} gave the same numbers on all {trace.world} ranks"
        yield finding("same-randomness", "all ranks draw the same noise", where(tables[0][equal[0]]), seen)


def _dropout(trace: Trace) -> Iterator[Finding]:
    tables = [{r["n"]: r for r in rank.of("input") if "generator" in r} for rank in trace.ranks]
    shared = sorted(set.intersection(*(set(t) for t in tables)))
    if shared and all(len({t[n]["generator"] for t in tables}) == 1 for n in shared):
        seen = f"the generators are in the same state before forward passes {', '.join(map(str, shared[:4]))}"
        at = where(tables[0][shared[0]])
        yield finding("same-randomness", "all ranks drop the same units", at, seen)


def _augmentation(trace: Trace) -> Iterator[Finding]:
    """In the loading process itself."""
    tables = [{r["n"]: r for r in rank.of("fetch") if r["drawn"]} for rank in trace.ranks]
    shared = sorted(set.intersection(*(set(t) for t in tables)))
    for n in shared:
        for source in sorted(set.intersection(*(set(t[n]["drawn"]) for t in tables))):
            if len({t[n]["drawn"][source] for t in tables}) == 1:
                at = where(next(iter(trace.ranks[0].of("loader")), None))
                seen = f"the data set draws from `{source}`, which is in the same state on all ranks at fetch {n}"
                yield finding("same-randomness", "all ranks augment their samples with the same numbers", at, seen)
                return


def _workers(trace: Trace) -> Iterator[Finding]:
    """(source, state) → the workers that were in it when they fetched something for the first time."""
    holders: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for rank in trace.ranks:
        for records in rank.workers:
            first: Record | None = next((r for r in records if r["kind"] == "fetch" and r["drawn"]), None)
            for source, state in (first["drawn"] if first else {}).items():
                holders[source, state].add((rank.number, first["worker"] if first else 0))
    for (source, _), who in holders.items():
        if len(who) > 1:
            at = where(next(iter(trace.ranks[0].of("loader")), None))
            names = ", ".join(f"worker {w} of rank {r}" for r, w in sorted(who))
            what = "loader workers draw the same random numbers"
            yield finding("same-workers", what, at, f"`{source}` starts in the same state in {names}")
            return
