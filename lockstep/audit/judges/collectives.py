"""Ranks call the same collectives in the same order, take the same number of steps, and end."""

import signal
from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import Backward, Collective, Join, OptimizerInit
from ..model import Rank, Trace
from ..source import depends_on_rank

UNUSED = "parameters that were not used in producing loss"
"""DDP's error when it waits for a gradient that never comes."""
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
        mismatch = _mismatch(trace)
        uneven = None if mismatch and depends_on_rank(mismatch.at) else _uneven(trace)
        yield from filter(None, [uneven or mismatch])
        if trace.hung and not any(map(_failed_by_itself, trace.ranks)):
            at = next((rank.stack[0] for rank in trace.ranks if rank.stack), None)
            yield finding("hangs", "the ranks wait for each other forever", at, *(rank.ending for rank in trace.ranks))
    yield from _crashes(trace)


_Group = tuple[tuple[int, ...] | None, str, bool]
"""The ranks of a group, or None for all; its name; whether a thread beside the main one calls."""


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


def _mismatch(trace: Trace) -> Finding | None:
    groups: dict[_Group, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, call in trace.all(Collective):
        if call.op not in ("init_process_group", "destroy_process_group"):
            groups[_group(call)][rank.number].append(call)
    for group in sorted(groups, key=lambda g: (g[0] or (), *g[1:])):
        members = trace.ranks if group[0] is None else [r for r in trace.ranks if r.number in group[0]]
        calls = [groups[group][r.number] for r in members]
        for n in range(max(map(len, calls), default=0)):
            present = [(r, c[n]) for r, c in zip(members, calls, strict=True) if len(c) > n]
            absent = [r for r, c in zip(members, calls, strict=True) if len(c) <= n]
            if absent and (trace.over or any(map(_failed_by_itself, absent))):
                break  # they could not call it any more
            if absent:
                return _missing_callers(present, absent)
            first = present[0][1]
            for rank, call in present:
                if _signature(call) != _signature(first):
                    what = f"rank {members[0].number} calls {_describe(first)}, rank {rank.number} {_describe(call)}"
                    at = first.at if depends_on_rank(first.at) else call.at
                    return finding("collective-mismatch", what, at, f"as number {n + 1} of their collectives")
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
    if any(UNUSED in rank.error for rank in by_themselves):
        return  # this error of DDP has a finding of its own
    for rank in (by_themselves or failed)[:1]:
        last = rank.end or (rank.events[-1] if rank.events else None)
        error = (rank.error or f"status {rank.end.status}").strip() if rank.end else ""
        what = f"failed: {error.splitlines()[0][:300]}" if error else f"was {rank.exit_status}"
        yield finding("crashed", f"rank {rank.number} {what}", last.at if last else None)
