"""Ranks call the same collectives in the same order, take the same number of steps, and end."""

import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..catalog import Finding, finding
from ..events import Backward, Collective, Join, OptimizerInit
from ..model import Rank, Trace
from ..source import demanded_world, depends_on_rank

_LOST_RANK = (
    "gloo/transport", "DistNetworkError", "DistStoreError", "monitoredBarrier", "ncclRemoteError", "ncclSystemError",
    "NCCL communicator was aborted", "Watchdog caught collective operation timeout",
)  # fmt: skip
"""In errors of gloo, NCCL and torch when another rank has exited or is in another call."""
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
_OF_TORCH = ("RuntimeError", "Dist")
"""In errors of any connection that a script has; and how those begin that torch raises."""


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world > 1:
        mismatch, is_cause = _mismatch(trace)
        yield from filter(None, [(None if is_cause else _uneven(trace)) or mismatch])
        if trace.hung and not any(map(_failed_by_itself, trace.ranks)):
            at = next((rank.stack[0] for rank in trace.ranks if rank.stack), None)
            yield finding("hangs", "the ranks wait for each other forever", at, *(rank.ending for rank in trace.ranks))
    yield from _crashes(trace)


_Group = tuple[tuple[int, ...] | None, str, bool]
"""The ranks of a group, or None for all; its name; whether a thread beside the main one calls."""


@dataclass(frozen=True)
class _Turn:
    """One collective of a rank, and how many backward passes the rank had begun before it."""

    call: Collective
    backwards: int


def _group(call: Collective) -> _Group:
    return None if call.group is None else tuple(call.group), call.group_name, call.in_thread


def _signature(call: Collective) -> tuple[object, ...]:
    # only an all-reduce, a broadcast or a reduce need the same shape everywhere
    shape = tuple(call.shape or ()) if call.op in ("all_reduce", "broadcast", "reduce") else ()
    return call.op, shape, call.dtype if shape else None, call.root, str(call.members)


def _describe(call: Collective) -> str:
    root = f", root {call.root}" if call.root is not None else ""
    shape = f" of {tuple(call.shape)}" if call.shape else ""
    return f"{call.op}{shape}{root} at {call.at}"


def _turns(trace: Trace) -> dict[_Group, dict[int, list[_Turn]]]:
    """The collectives of each group, by rank."""
    groups: dict[_Group, dict[int, list[_Turn]]] = defaultdict(lambda: defaultdict(list))
    for rank in trace.ranks:
        backwards = 0
        for event in rank.events:
            backwards += isinstance(event, Backward)
            if isinstance(event, Collective) and event.op not in ("init_process_group", "destroy_process_group"):
                groups[_group(event)][rank.number].append(_Turn(event, backwards))
    return groups


def _mismatch(trace: Trace) -> tuple[Finding | None, bool]:
    """The first collective that is not the same call on all ranks of its group, and whether it is sure to be the cause
    of what follows."""
    groups = _turns(trace)
    for group in sorted(groups, key=lambda g: (g[0] or (), *g[1:])):
        members = trace.ranks if group[0] is None else [r for r in trace.ranks if r.number in group[0]]
        turns = [groups[group][r.number] for r in members]
        for n in range(max(map(len, turns), default=0)):
            present = [(r, own[n].call) for r, own in zip(members, turns, strict=True) if len(own) > n]
            absent = [r for r, own in zip(members, turns, strict=True) if len(own) <= n]
            if absent and (trace.over or any(map(_failed_by_itself, absent))):
                break  # they could not call it any more
            first = present[0][1]
            other = next(((r, call) for r, call in present if _signature(call) != _signature(first)), None)
            if not absent and other is None:
                continue
            if extra := _extra_call(members, turns, n):
                return extra, True
            if other is None or absent:
                found = _missing_callers(present, absent)
            else:
                what = (
                    f"rank {members[0].number} calls {_describe(first)}, rank {other[0].number} {_describe(other[1])}"
                )
                at = first.at if depends_on_rank(first.at) else other[1].at
                found = finding("collective-mismatch", what, at, f"as number {n + 1} of their collectives")
            return found, depends_on_rank(found.at)
    return None, False


def _extra_call(members: list[Rank], turns: list[list[_Turn]], last: int) -> Finding | None:
    """A call that one rank makes and another never does, paired with another line of that rank: from there on the ranks
    are one call apart, though the calls themselves may look the same for a long time."""
    sites = [{turn.call.at for turn in own} for own in turns]
    for n in range(min(last + 1, *map(len, turns))):
        mine = turns[0][n]
        for other, theirs in ((k, own[n]) for k, own in enumerate(turns) if own[n].backwards == mine.backwards):
            is_extra = mine.call.at not in sites[other], theirs.call.at not in sites[0]
            if is_extra[0] == is_extra[1]:  # one line, or lines that are branches of one decision
                continue
            pair = [(members[0], mine.call), (members[other], theirs.call)]
            (rank, call), (paired, partner) = pair if is_extra[0] else pair[::-1]
            what = f"rank {rank.number} calls {_describe(call)}, which rank {paired.number} never does"
            seen = f"as number {n + 1} of their collectives it is paired with {_describe(partner)}"
            return finding("collective-mismatch", what, call.at, seen, *(one.ending for one in (rank, paired)))
    return None


def _missing_callers(present: list[tuple[Rank, Collective]], absent: list[Rank]) -> Finding:
    callers = ", ".join(str(rank.number) for rank, _ in present)
    call = present[0][1]
    what = f"{call.op} is called by {'rank' if len(present) == 1 else 'ranks'} {callers} only"
    return finding("collective-mismatch", what, call.at, *(rank.ending for rank in absent))


def _uneven(trace: Trace) -> Finding | None:
    if trace.over or any(rank.first(Join) or _failed_by_itself(rank) for rank in trace.ranks):
        return None
    if 0 < trace.ranks[0].started_ranks < trace.world:  # some have nothing to do
        return None
    backwards = [len(rank.of(Backward)) for rank in trace.ranks]
    steps = [len(rank.steps) for rank in trace.ranks]
    different, unit = (backwards, "backward passes") if len(set(backwards)) > 1 else (steps, "steps")
    if len(set(different)) == 1:
        return None
    rank = trace.ranks[different.index(min(different))]
    at = rank.of(Backward)[-1].at if rank.of(Backward) else rank.line(OptimizerInit)
    counts = (f"rank {n}: {b} backward, {s} steps" for n, (b, s) in enumerate(zip(backwards, steps, strict=True)))
    what = f"ranks take different numbers of {unit}"
    return finding("uneven-steps", what, at, ", ".join(counts), *(rank.ending for rank in trace.ranks))


def _failed_by_itself(rank: Rank) -> bool:
    """Whether a rank failed, and not because it lost the connection to another rank."""
    aborted = rank.end is None and rank.status == -signal.SIGABRT
    error = rank.printed if aborted else rank.error
    connection = error.startswith(_OF_TORCH) and any(sign in error for sign in _LOST_CONNECTION)
    return rank.failed and not connection and not any(sign in error for sign in _LOST_RANK)


def _crashes(trace: Trace) -> Iterator[Finding]:
    failed = [rank for rank in trace.ranks if rank.failed]
    by_themselves = [rank for rank in failed if _failed_by_itself(rank)]
    for rank in sorted(by_themselves or failed, key=lambda r: r.events[-1].t if r.events else 0.0)[:1]:
        last = rank.end or (rank.events[-1] if rank.events else None)
        error = (rank.error or f"status {rank.end.status}").strip() if rank.end else ""
        what = f"failed: {error.splitlines()[0][:300]}" if error else f"was {rank.exit_status}"
        at = last.at if last else None
        wanted = demanded_world(at, rank.error) if len(failed) == trace.world and not rank.steps else None
        advice = (
            [f"it asks for {wanted} ranks: lockstep audit --nproc {wanted}"]
            if wanted not in (None, trace.world)
            else []
        )
        yield finding("crashed", f"rank {rank.number} {what}", at, *advice)
