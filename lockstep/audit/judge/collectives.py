"""Ranks call the same collectives in the same order, take as many steps, and come to an end."""

import ast
import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from textwrap import shorten

from ..catalog import Finding, finding
from ..trace import Rank, Record, Site, Trace, where

UNUSED = "parameters that were not used in producing loss"
"""What DDP says when it waits for a gradient that never comes."""
_GONE = (
    "gloo/transport", "DistNetworkError", "DistStoreError", "monitoredBarrier", "ncclRemoteError", "ncclSystemError",
    "NCCL communicator was aborted", "Watchdog caught collective operation timeout",
)  # fmt: skip
"""What gloo, NCCL and torch say when another rank is gone, or at another place."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
_OF_TORCH = ("RuntimeError", "Dist")
"""What others say as well, of whatever a script is connected to; and the errors in which torch says it."""
_CONDITIONS = ("rank", "local", "main", "master", "zero", "primary", "leader")


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world == 1:
        yield from _crashes(trace)
        return
    guarded = _mismatch(trace)
    if guarded and _depends_on_rank(guarded.at):
        yield guarded
    else:
        uneven = _uneven(trace)
        if uneven:
            yield uneven
        elif guarded:
            yield guarded
    if trace.hung and not any(map(_own_crash, trace.ranks)):
        yield finding("hangs", "the ranks wait for each other for ever", _place(trace), *_doing(trace))
    yield from _crashes(trace)


def doing(rank: Rank) -> str:
    """What a rank was in at the end, in words."""
    opened = _open(rank)
    place = rank.stack[0] if rank.stack else where(opened or (rank.records[-1] if rank.records else None))
    if rank.first("enough"):
        return "had taken its steps"
    end = rank.first("end")
    if end and rank.failed and "why" not in end:
        return f"had ended with status {end['status']}"
    if end and rank.failed:
        return f"had failed at {where(end)}: {shorten(end['why'], 160, placeholder=' …')}"
    if end:
        return "had ended"
    if rank.failed:
        return f"was {_ended(rank)}" + (f" at {place}" if place else "")
    if not rank.records:
        return "left no record"
    if opened is None:
        return f"was at {place}"
    names = {"backward": "backward (gradients are synchronised there)", "forward": "forward"}
    return f"waits in {names.get(opened['kind']) or opened['op']} at {place}"


def _doing(trace: Trace) -> list[str]:
    return [f"rank {rank.number} {doing(rank)}" for rank in trace.ranks]


def _place(trace: Trace) -> Site | None:
    return next((rank.stack[0] for rank in trace.ranks if rank.stack), None)


def _open(rank: Rank) -> Record | None:
    """The call that was entered and not left."""
    opened: list[Record] = []
    for record in rank.records:
        if record.get("phase") == "in":
            opened.append(record)
        elif record.get("phase") in ("out", "failed") and opened:
            opened.pop()
    return opened[-1] if opened else None


_Group = tuple[tuple[int, ...] | None, str, bool]
"""The ranks of a group, or None for all; its name; whether a thread beside the main one calls."""


def _group(call: Record) -> _Group:
    ranks = call.get("group")
    return None if ranks is None else tuple(ranks), call.get("name", ""), call.get("aside", False)


def _sequence(rank: Rank, group: _Group) -> list[Record]:
    calls = [c for c in rank.of("collective") if c["phase"] == "in" and _group(c) == group]
    return [c for c in calls if c["op"] not in ("init_process_group", "destroy_process_group")]


def _signature(call: Record) -> tuple[object, ...]:
    # only an all-reduce, a broadcast or a reduce need the same shape everywhere
    shape = tuple(call.get("shape") or ()) if call["op"] in ("all_reduce", "broadcast", "reduce") else ()
    return call["op"], shape, call.get("dtype") if shape else None, call.get("root"), str(call.get("members"))


def _describe(call: Record) -> str:
    root = f", root {call['root']}" if "root" in call else ""
    shape = f" of {tuple(call['shape'])}" if call.get("shape") else ""
    return f"{call['op']}{shape}{root} at {where(call)}"


def _mismatch(trace: Trace) -> Finding | None:
    groups = {_group(c) for _, c in trace.all("collective") if c["phase"] == "in"}
    for group in sorted(groups, key=lambda g: (g[0] or (), *g[1:])):
        members = trace.ranks if group[0] is None else [r for r in trace.ranks if r.number in group[0]]
        calls = [_sequence(r, group) for r in members]
        for n in range(max(map(len, calls), default=0)):
            present = [(r, c[n]) for r, c in zip(members, calls, strict=True) if len(c) > n]
            if len(present) < len(members):
                absent = [r for r in members if all(r is not p for p, _ in present)]
                if trace.over or any(_own_crash(r) for r in absent):
                    break  # it was cut off, or failed by itself: no wonder
                return _lonely(members, present)
            first = present[0][1]
            other = next(((r, c) for r, c in present if _signature(c) != _signature(first)), None)
            if other:
                rank, call = other
                return finding(
                    "collective-mismatch",
                    f"rank {members[0].number} calls {_describe(first)}, rank {rank.number} {_describe(call)}",
                    where(first if _depends_on_rank(where(first)) else call),
                    f"as number {n + 1} of their collectives",
                )
    return None


def _lonely(members: list[Rank], present: list[tuple[Rank, Record]]) -> Finding:
    callers = [r.number for r, _ in present]
    absent = [r for r in members if r.number not in callers]
    call = present[0][1]
    who = "rank" if len(callers) == 1 else "ranks"
    others = [f"rank {r.number} {doing(r)}" for r in absent]
    text = f"{call['op']} is called by {who} {', '.join(map(str, callers))} only"
    return finding("collective-mismatch", text, where(call), *others)


@lru_cache
def _source(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _depends_on_rank(at: Site | None) -> bool:
    """Whether a line lies in a branch whose condition speaks of the rank."""
    tree = _source(at.file) if at else None
    if tree is None or at is None:
        return False
    around = [n for n in ast.walk(tree) if isinstance(n, ast.If) and n.lineno <= at.line <= (n.end_lineno or 0)]
    return any(word in ast.unparse(node.test).lower() for node in around for word in _CONDITIONS)


def _uneven(trace: Trace) -> Finding | None:
    if trace.over or any(rank.first("join") for rank in trace.ranks) or any(_own_crash(rank) for rank in trace.ranks):
        return None
    if any(spawn["nprocs"] < trace.world for spawn in trace.ranks[0].of("spawn")):  # some have nothing to do
        return None
    backwards = [sum(b["phase"] == "in" for b in rank.of("backward")) for rank in trace.ranks]
    steps = [len(rank.steps) for rank in trace.ranks]
    if len(set(backwards)) == 1 and len(set(steps)) == 1:
        return None
    few = backwards.index(min(backwards)) if len(set(backwards)) > 1 else steps.index(min(steps))
    rank = trace.ranks[few]
    last = [r for r in rank.records if r["kind"] == "backward"]
    counts = ", ".join(
        f"rank {n}: {b} backward, {s} steps" for n, (b, s) in enumerate(zip(backwards, steps, strict=True))
    )
    what = (
        "ranks take different numbers of backward passes"
        if len(set(backwards)) > 1
        else "ranks take different numbers of steps"
    )
    return finding("uneven-steps", what, where(last[-1] if last else rank.first("optimizer")), counts, *_doing(trace))


def _own_crash(rank: Rank) -> bool:
    """An error of the rank's own, not one that came over the network because another rank was gone."""
    end = rank.first("end")
    why = end.get("why", "") if end else rank.printed if rank.status == -signal.SIGABRT else ""
    theirs = any(sign in why for sign in _GONE) or (why.startswith(_OF_TORCH) and any(s in why for s in _LOST))
    return rank.failed and not theirs


def _ended(rank: Rank) -> str:
    """How the process of a rank that could not say so itself came to its end."""
    status = rank.status or 0
    return f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"ended with status {status}"


def _crashes(trace: Trace) -> Iterator[Finding]:
    own = [rank for rank in trace.ranks if _own_crash(rank)]
    lost = [rank for rank in trace.ranks if rank.failed]
    if any(UNUSED in (rank.first("end") or {}).get("why", "") for rank in own):
        return  # DDP's word for a finding of its own
    for rank in (own or lost)[:1]:
        end = rank.first("end")
        why = (end.get("why") or f"status {end['status']}").strip() if end else ""
        text = f"failed: {why.splitlines()[0][:300]}" if why else f"was {_ended(rank)}"
        yield finding("crashed", f"rank {rank.number} {text}", where(end or next(reversed(rank.records), None)))
