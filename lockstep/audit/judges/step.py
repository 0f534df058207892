"""The step itself: zero, forward, backward, step, each as often as it should be."""

from collections import Counter
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import Backward, Batch, InputChanged, NoSync, PassStart, Step
from ..model import Rank, Trace


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    stale = [s for s in rank.of(Step) if s.stale and s.backwards]
    if len(stale) >= 2:
        what = "gradients of the step before are still there when the next one's are computed"
        yield finding("no-zero-grad", what, stale[0].at, f"seen in {len(stale)} steps, first in {stale[0].n}")
    without = next((s for s in rank.of(Step) if s.backwards == 0 and not s.without_gradients), None)
    if without:
        what = "an optimizer step without a backward pass since the last one"
        yield finding("step-without-backward", what, without.at, f"step {without.n}")
    region = next((r for r in rank.of(NoSync) if r.backwards and not r.forwards), None)
    if region:
        what = "only the backward pass is under no_sync(): gradients are synchronised all the same"
        yield finding("idle-no-sync", what, region.at, f"{region.backwards} backward, no forward inside")
    yield from _accumulation(rank, trace.world)
    if changed := rank.first(InputChanged):
        what = f"{changed.name} is changed in place between forward and backward"
        yield finding("changed-inputs", what, changed.at, f"shape {tuple(changed.shape)}")


def _accumulation(rank: Rank, world: int) -> Iterator[Finding]:
    """Several micro-batches for one step: scaled, synchronised once, with no remainder."""
    done = rank.updates
    usual = Counter(len(u.backwards) for u in done).most_common(1)
    micro = usual[0][0] if usual else 1
    one_line = len({b.at for u in done for b in u.backwards}) == 1
    if micro < 2 or not one_line or len(rank.of(Batch)) < 2 * len(done):
        return
    at = done[0].backwards[0].at
    if not any(b.scaled for u in done for b in u.backwards):
        what = f"gradients of {micro} micro-batches are summed, and the loss is not divided by {micro}"
        yield finding("unscaled-accumulation", what, at, f"{len(done)} steps of {micro} backward passes")
    yield from _divided_twice(rank, micro, [b for u in done for b in u.backwards])
    flags = [u.syncs for u in done if len(u.syncs) == micro]
    if world > 1 and flags and all(all(syncs) for syncs in flags):
        what = f"gradients are synchronised in all {micro} micro-batches of a step"
        yield finding("needless-sync", what, at, f"{micro * len(done)} synchronisations for {len(done)} steps")
    lines = {(start.loader, start.epoch): start.at for start in rank.of(PassStart)}
    for n, update in enumerate(done):
        passes = [lines.get(p) for p in set(update.passes)]
        if len(set(passes)) < len(passes):  # two passes at one line are two epochs
            what = "gradients of an epoch's last micro-batches are used in the next epoch's first step"
            seen = f"step {n + 1}: {update.passes.count(update.passes[0])} of {len(update.passes)} were left over"
            yield finding("leaking-accumulation", what, at, seen)
            return


def _divided_twice(rank: Rank, micro: int, backwards: list[Backward]) -> Iterator[Finding]:
    divisors = [[n for n in backward.divided_by if abs(n - micro) < 0.01] for backward in backwards]
    samples = {batch.rows for batch in rank.of(Batch)}  # a loss is divided by their number, too
    if micro not in samples and all(len(found) >= 2 for found in divisors):
        what = f"the loss of each of {micro} micro-batches is divided by {micro} twice"
        seen = f"its last operations divide by {', '.join(f'{n:g}' for n in backwards[0].divided_by)}"
        yield finding("loss-divided-twice", what, backwards[0].at, seen)
