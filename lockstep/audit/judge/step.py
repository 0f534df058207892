"""The step itself: zero, forward, backward, step, each as often as it should be."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..catalog import Finding, finding
from ..trace import Record, Trace, where


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    stale = [s for s in rank.of("step") if s["stale"] and s["backwards"]]
    if len(stale) >= 2:
        what = "gradients of the step before are still there when the next one's are computed"
        yield finding("no-zero-grad", what, where(stale[0]), f"seen in {len(stale)} steps, first in {stale[0]['n']}")
    for record in rank.of("step"):
        if record["backwards"] == 0 and not record.get("idle"):
            what = "an optimizer step without a backward pass since the last one"
            yield finding("step-without-backward", what, where(record), f"step {record['n']}")
            break
    for record in rank.of("no_sync"):
        if record["backwards"] and not record["forwards"]:
            what = "only the backward pass is under no_sync(): gradients are synchronised all the same"
            yield finding("idle-no-sync", what, where(record), f"{record['backwards']} backward, no forward inside")
            break
    yield from _accumulation(rank.records, trace.world)
    for record in rank.of("changed"):
        what = f"{record['what']} is changed in place between forward and backward"
        yield finding("changed-inputs", what, where(record), f"shape {tuple(record['shape'])}")
        break


@dataclass
class _Step:
    """What led to one optimizer step."""

    backwards: list[Record] = field(default_factory=list)
    syncs: list[bool] = field(default_factory=list)
    """Of each forward pass of a wrapper: whether its backward pass synchronises."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """The pass of a loader that the batch of each backward pass came from."""


def _steps(records: list[Record]) -> tuple[list[_Step], int]:
    """The finished steps, and how many batches there were in all."""
    steps, last, batches = [_Step()], (-1, -1), 0
    for record in records:
        kind, now = record["kind"], steps[-1]
        if kind == "backward" and record["phase"] == "in":
            now.backwards.append(record)
            now.passes.append(last)
        elif kind == "forward" and record["phase"] == "out" and record["learning"] and record["syncs"] is not None:
            now.syncs.append(record["syncs"])
        elif kind == "batch":
            batches, last = batches + 1, (record["n"], record["epoch"])
        elif kind == "zero_grad" and now.backwards:
            steps[-1] = _Step()
        elif kind == "step":
            steps.append(_Step())
    return [s for s in steps[:-1] if s.backwards], batches


def _accumulation(records: list[Record], world: int) -> Iterator[Finding]:
    """Several batches for one step: scaled, synchronised once, with no remainder."""
    done, batches = _steps(records)
    usual = Counter(len(s.backwards) for s in done).most_common(1)
    micro = usual[0][0] if usual else 1
    if micro < 2 or len({where(b) for s in done for b in s.backwards}) > 1 or batches < 2 * len(done):
        return
    at = where(done[0].backwards[0])
    if not any(b["scaled"] for s in done for b in s.backwards):
        what = f"gradients of {micro} micro-batches are summed, and the loss is not divided by {micro}"
        yield finding("unscaled-accumulation", what, at, f"{len(done)} steps of {micro} backward passes")
    flags = [s.syncs for s in done if len(s.syncs) == micro]
    if world > 1 and flags and all(all(s) for s in flags):
        what = f"gradients are synchronised in all {micro} micro-batches of a step"
        yield finding("needless-sync", what, at, f"{micro * len(done)} synchronisations for {len(done)} steps")
    places = {(r["n"], r["epoch"]): where(r) for r in records if r["kind"] == "loader"}
    for n, step in enumerate(done):
        sites = [places.get(p) for p in set(step.passes)]
        if len(set(sites)) < len(sites):
            what = "gradients of an epoch's last micro-batches are used in the next epoch's first step"
            left = step.passes.count(step.passes[0])
            yield finding(
                "leaking-accumulation", what, at, f"step {n + 1}: {left} of {len(step.passes)} were left over"
            )
            return
