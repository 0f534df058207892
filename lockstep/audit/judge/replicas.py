"""One model: equal weights, equal rates, equal buffers on all ranks, and something that is trained."""

from collections.abc import Iterator
from typing import Any

from ...watch.agreement import disagreement
from ...watch.drift import differing
from ..catalog import Finding, finding
from ..trace import Rank, Record, Site, Trace, where
from .collectives import UNUSED


def judge(trace: Trace) -> Iterator[Finding]:
    yield from _schedule(trace)
    yield from _weights(trace)
    yield from _buffers(trace)
    yield from _training(trace)
    yield from _gradients(trace)


def _by_step(rank: Rank, kind: str) -> dict[tuple[int, int], Record]:
    return {(r["optimizer"], r["n"]): r for r in rank.of(kind)}


def _looked_at(rank: Rank) -> dict[tuple[int, int], Record]:
    """Steps, with the sums of their weights where these were taken at once or at the end of the epoch."""
    steps = _by_step(rank, "step")
    later = {key: {"sums": look["sums"]} for key, look in _by_step(rank, "look").items()}
    return {key: step | later.get(key, {}) for key, step in steps.items()}


def common(sums: list[dict[str, int]]) -> list[dict[str, int]]:
    """Only what all ranks have: names may be unknown on some."""
    names = set.intersection(*(set(s) for s in sums))
    return [{name: value for name, value in s.items() if name in names} for s in sums]


def _weights(trace: Trace) -> Iterator[Finding]:
    if trace.world == 1 or any(rank.first("join") for rank in trace.ranks):
        return  # under Join the k-th step of one rank is not that of another
    before = [_by_step(rank, "weights") for rank in trace.ranks]
    steps = [_looked_at(rank) for rank in trace.ranks]
    for key in sorted(set.intersection(*(set(s) for s in steps)), key=lambda k: k[1]):
        records = [s[key] for s in steps]
        if not all("sums" in r for r in records):
            continue
        difference = differing(common([r["sums"] for r in records]))
        if difference is None:
            continue
        name, count, rank = difference
        start = (key[0], 0)
        same_start = all(start in b for b in before) and not differing(common([b[start]["sums"] for b in before]))
        at, cause = _cause(trace, records[0], name, same_start)
        seen = (
            f"after step {key[1]} {count} of {len(records[0]['sums'])} tensors of rank {rank} are not those of rank 0"
        )
        yield finding("unsynchronised", f"the ranks train different models: {cause}", at, f"{seen}, first {name}")
        return


def _cause(trace: Trace, step: Record, name: str, same_start: bool) -> tuple[Site | None, str]:
    """Why gradients were not synchronised, as far as it was seen."""
    rank = trace.ranks[0]
    around = rank.first("around")
    wraps = rank.of("ddp")
    forwards = [f for f in rank.of("forward") if f["learning"] and f["syncs"] is not None]
    loose: list[str] = next((s["loose"] for s in rank.of("step") if s.get("loose")), [])
    if around:
        return where(around), "the forward pass goes around DDP (through .module), which then synchronises nothing"
    if wraps and not forwards:
        return where(wraps[0]), "the model was wrapped in DDP here, but the wrapper is never called"
    if wraps and not any(f["syncs"] for f in forwards):
        return where(rank.first("no_sync") or forwards[0]), "every forward pass is under no_sync()"
    if loose:
        more = f" and {len(loose) - 1} more" if len(loose) > 1 else ""
        return where(step), f"{loose[0]}{more} is trained, but outside of what DDP or FSDP synchronises"
    if wraps and not same_start:
        return where(step), "DDP made their weights equal, and something changed them before the first step"
    if not wraps and not rank.of("fsdp") and not same_start:
        return where(step), "they start from different weights, and nothing makes them equal"
    idle = ("barrier", "init_process_group", "destroy_process_group", "new_group")
    if not wraps and not rank.of("fsdp") and all(c["op"] in idle for c in rank.of("collective")):
        return where(step), "nothing synchronises gradients: no DDP, no FSDP, no collective"
    return where(step), f"{name} differs"


def _schedule(trace: Trace) -> Iterator[Finding]:
    if trace.world == 1:
        return
    plateaus = [rank.of("plateau") for rank in trace.ranks]
    for records in zip(*plateaus, strict=False):
        if disagreement([{"value": repr(r["value"])} for r in records]):
            values = ", ".join(f"rank {n}: {r['value']:g}" for n, r in enumerate(records))
            what = "the schedule is driven by a value that differs between ranks"
            yield finding("differing-schedule", what, where(records[0]), values)
            return
    steps = [_by_step(rank, "step") for rank in trace.ranks]
    for key in sorted(set.intersection(*(set(s) for s in steps)), key=lambda k: k[1]):
        records = tuple(s[key] for s in steps)
        if found := disagreement([{"lr": r["lr"]} for r in records]):
            a, b = records[0]["lr"], records[found[1]]["lr"]
            where_else = [r for rank in trace.ranks for r in rank.of("schedule")]
            at = where(where_else[0]) if where_else else where(records[0])
            what = "the learning rate differs between ranks"
            yield finding("differing-schedule", what, at, f"at step {key[1]}: {a} on rank 0, {b} on rank {found[1]}")
            return
    for records in zip(*(rank.of("scale") for rank in trace.ranks), strict=False):
        if found := disagreement([{"scale": r["value"]} for r in records]):
            what = "the scale of the gradient scaler differs between ranks"
            yield finding("differing-schedule", what, where(records[0]))
            return


def _buffers(trace: Trace) -> Iterator[Finding]:
    if trace.world == 1:
        return
    for record in trace.ranks[0].of("buffers"):
        if record["local_norms"]:
            wrap = next((r for r in trace.ranks[0].of("ddp") if r["n"] == record["ddp"]), None)
            names = ", ".join(record["local_norms"][:3])
            what = f"{len(record['local_norms'])} BatchNorm layers use the statistics of each rank alone"
            yield finding("local-batch-norm", what, where(wrap), f"layers: {names}")
            break
    tables = [{(r["ddp"], r["n"]): r for r in rank.of("buffers")} for rank in trace.ranks]
    for key in sorted(set.intersection(*(set(t) for t in tables))):
        difference = differing(common([t[key]["sums"] for t in tables]))
        if difference:
            name, count, rank = difference
            wrap = next((r for r in trace.ranks[0].of("ddp") if r["n"] == key[0]), None)
            seen = f"before forward pass {key[1]} {count} buffers of rank {rank} are not those of rank 0, first {name}"
            yield finding("drifting-buffers", "buffers differ between ranks", where(wrap), seen)
            return


def _training(trace: Trace) -> Iterator[Finding]:
    ends = [rank.first("end") for rank in trace.ranks]
    elsewhere = any(rank.of("process") for rank in trace.ranks)
    well = all(e and e["how"] != "crash" and e["status"] == 0 for e in ends)
    if well and not elsewhere and not any(r.steps for r in trace.ranks):
        optimizer = trace.ranks[0].first("optimizer")
        backwards = len(trace.ranks[0].of("backward"))
        seen = f"{len(trace.ranks[0].of('batch'))} batches, {backwards // 2} backward passes, no optimizer step"
        yield finding("no-steps", "the script ended normally and took no step", where(optimizer), seen)
        return
    rank = trace.ranks[0]
    idle = next((s for s in rank.steps if s.get("idle")), None)
    if idle and idle.get("foreign"):
        what = "the optimizer's parameters are not those of the model that runs"
        yield finding("foreign-parameters", what, where(rank.first("optimizer")), "none of them has a gradient")
    yield from _unchanged(rank)


def _unchanged(rank: Rank) -> Iterator[Finding]:
    for start in rank.of("weights"):
        sums = [s["sums"] for s in rank.of("step") if s["optimizer"] == start["optimizer"] and s.get("sums")]
        if len(sums) >= 2 and all(s == start["sums"] for s in sums):
            made = next((o for o in rank.of("optimizer") if o["n"] == start["optimizer"]), None)
            rates = sorted({lr for s in rank.of("step") for lr in s["lr"]})
            seen = f"{len(start['sums'])} tensors are bit for bit what they were; learning rates {rates}"
            yield finding("nothing-changed", f"no parameter changed in {len(rank.steps)} steps", where(made), seen)
            return


def _gradients(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    steps = rank.of("step")
    wrap: Any = where(rank.first("ddp") or rank.first("optimizer"))
    ended = next((e for r in trace.ranks for e in r.of("end") if UNUSED in e.get("why", "")), None)
    if ended:
        yield finding("no-gradient", "DDP waits for gradients of parameters that take no part in the loss", wrap)
        return
    waiting = [s["waiting"] for s in steps if "waiting" in s]
    if len(steps) >= 2 and waiting and waiting[-1] and not any(s.get("idle") for s in steps):
        names = ", ".join(waiting[-1][:3])
        what = f"{len(waiting[-1])} parameters never get a gradient"
        yield finding("no-gradient", what, wrap, f"in {len(steps)} steps: {names}")
    unowned = [s["unowned"] for s in steps if s.get("unowned")]
    if unowned:
        names = ", ".join(unowned[-1][:3])
        what = f"{len(unowned[-1])} parameters get gradients but are in no optimizer"
        yield finding("untrained-parameters", what, where(rank.first("optimizer")), names)
    searches = [s["searched_in_vain"] for r in trace.ranks for s in r.of("step") if "searched_in_vain" in s]
    if len(searches) >= 2 * trace.world and all(searches) and not any(waiting[-1:]):
        what = "find_unused_parameters=True, but every parameter is used in every step"
        yield finding("needless-unused-search", what, wrap, f"{len(steps)} steps on {trace.world} ranks")
