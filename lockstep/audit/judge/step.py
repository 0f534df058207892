"""The step itself: zero, forward, backward, step, each as often as it should be."""

from collections import Counter
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..trace import Record, Site, Trace, where


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    stale = [b for b in rank.of("backward") if b.get("stale")]
    if len(stale) >= 2:
        what = "gradients of the step before are still there when the next one's are computed"
        yield finding("no-zero-grad", what, where(rank.first("step")), f"seen before {len(stale)} backward passes")
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


def _accumulation(records: list[Record], world: int) -> Iterator[Finding]:
    """Several batches for one step: scaled, synchronised once, with no remainder."""
    steps: list[list[Record]] = [[]]
    syncs: list[list[bool]] = [[]]
    batches = 0
    tails: list[tuple[int, Record]] = []
    for record in records:
        kind = record["kind"]
        if kind == "backward" and record["phase"] == "in":
            steps[-1].append(record)
        elif kind == "forward" and record["phase"] == "out" and record["learning"]:
            syncs[-1].append(record["syncs"])
        elif kind == "batch":
            batches += 1
        elif kind == "step":
            steps.append([])
            syncs.append([])
        elif kind == "pass_end" and steps[-1]:
            tails.append((len(steps[-1]), record))
        elif kind == "zero_grad":
            tails = [t for t in tails if not steps[-1] or len(steps[-1]) > t[0]]
            if not tails or steps[-1]:
                steps[-1] = []
    done = [s for s in steps[:-1] if s]
    usual = Counter(map(len, done)).most_common(1)
    micro = usual[0][0] if usual else 1
    if micro < 2 or len({_site(b) for s in done for b in s}) > 1 or batches < 2 * len(done):
        return
    at = _site(done[0][0])
    if not any(b["scaled"] for s in done for b in s):
        what = f"gradients of {micro} micro-batches are summed, and the loss is not divided by {micro}"
        yield finding("unscaled-accumulation", what, at, f"{len(done)} steps of {micro} backward passes")
    if world > 1 and (flags := [s for s in syncs[: len(done)] if len(s) == micro]) and all(all(s) for s in flags):
        what = f"gradients are synchronised in all {micro} micro-batches of a step"
        yield finding("needless-sync", what, at, f"{micro * len(done)} synchronisations for {len(done)} steps")
    if any(len(s) > micro or _spans(s, tails) for s in done):
        what = "gradients of an epoch's last micro-batches are used in the next epoch's first step"
        yield finding("leaking-accumulation", what, at, f"{tails[0][0] if tails else 1} of {micro} were left over")


def _spans(step: list[Record], tails: list[tuple[int, Record]]) -> bool:
    """Whether a loader's pass ended between the backward passes of one step."""
    return any(step[0]["t"] < end["t"] < step[-1]["t"] for _, end in tails)


def _site(record: Record) -> Site | None:
    return where(record)
