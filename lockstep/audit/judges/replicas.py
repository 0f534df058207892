"""One model: equal weights, equal buffers on all ranks, and something that is trained."""

from collections.abc import Iterator

from ...watch.drift import differing
from .. import events
from ..catalog import Finding, finding
from ..model import Rank, Trace
from ..source import Site, line_with, source_line

_NO_DATA = ("barrier", "init_process_group", "destroy_process_group", "new_group")
"""Collectives that synchronise no gradients."""


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world > 1:
        yield from _weights(trace)
        yield from _moved(trace.ranks[0])
        yield from _buffers(trace)
    yield from _training(trace)
    yield from _gradients(trace)


def _difference(checksums: list[dict[str, int]]) -> tuple[str, int, int] | None:
    """Between tensors that all ranks have: names may be unknown on some."""
    names = set.intersection(*(set(c) for c in checksums))
    return differing([{name: value for name, value in c.items() if name in names} for c in checksums])


def _weights(trace: Trace) -> Iterator[Finding]:
    if any(rank.first(events.Join) for rank in trace.ranks):
        return  # under Join the k-th step of one rank is not that of another
    averager = trace.ranks[0].first(events.SeldomAveraged)
    if trace.averaging_steps or (averager and averager.period > len(trace.ranks[0].steps)):
        return  # they differ in between, on purpose
    weights = trace.by_key(events.Weights, lambda w: (w.n, w.optimizer))
    for (n, optimizer), ranks in weights.items():
        difference = _difference([w.checksums for w in ranks]) if n else None
        if difference:
            name, count, rank = difference
            before = weights.get((0, optimizer))
            same_start = before is not None and not _difference([w.checksums for w in before])
            step = next((s for s in trace.ranks[0].of(events.Step) if (s.n, s.optimizer) == (n, optimizer)), None)
            at, cause = _cause(trace, step.at if step else None, name, same_start)
            tensors = f"{count} of {len(ranks[0].checksums)} tensors of rank {rank} are not those of rank 0"
            what = f"the ranks train different models: {cause}"
            yield finding("unsynchronised", what, at, f"after step {n} {tensors}, first {name}")
            return


def _cause(trace: Trace, step: Site | None, name: str, same_start: bool) -> tuple[Site | None, str]:
    """Why gradients were not synchronised, as far as it was seen."""
    rank = trace.ranks[0]
    ddp, fsdp = rank.first(events.DDPInit), rank.first(events.FSDPInit)
    outside = next((s.not_wrapped for s in rank.of(events.Step) if s.not_wrapped), [])
    if ddp and (found := _wrapper_without_effect(rank, ddp)):
        return found
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        return step, f"{outside[0]}{more} is trained, but outside of what DDP or FSDP synchronises"
    if ddp and not same_start:
        return step, "DDP made their weights equal, and something changed them before the first step"
    if not ddp and not fsdp and not same_start:
        return step, "they start from different weights, and nothing makes them equal"
    if not ddp and not fsdp and all(call.op in _NO_DATA for call in rank.of(events.Collective)):
        return step, "nothing synchronises gradients: no DDP, no FSDP, no collective"
    missing = [{name for s in r.of(events.Step) for name in s.no_gradient_yet or ()} for r in trace.ranks]
    if some := sorted(set[str].union(*missing) - set[str].intersection(*missing)):
        return step, f"{some[0]} has a gradient on some of the ranks only, and the others leave it out"
    return step, f"{name} differs"


def _wrapper_without_effect(rank: Rank, ddp: events.DDPInit) -> tuple[Site | None, str] | None:
    """Why DDP synchronises nothing, or not what is used."""
    forwards = [f for f in rank.of(events.Forward) if f.training and f.syncs is not None]
    bypassed, region = rank.first(events.WrapperBypassed), rank.first(events.NoSync)
    if bypassed and ".module" in source_line(bypassed.at):
        return bypassed.at, "the forward pass goes around DDP (through .module), which then synchronises nothing"
    if bypassed:
        what = "the model is called here without its wrapper, which then synchronises nothing"
        return bypassed.at, f"{what} (wrapped at {ddp.at})"
    if not forwards:
        return ddp.at, "the model was wrapped in DDP here, but the wrapper is never called"
    if not any(f.syncs for f in forwards):
        switch = line_with(rank.files, "require_backward_grad_sync")
        if region is None and switch:
            return switch, "require_backward_grad_sync is off in every forward pass"
        return (region or forwards[0]).at, "every forward pass is under no_sync()"
    several = [u.syncs for u in rank.updates if len(u.syncs) > 1]
    if several and not any(syncs[-1] for syncs in several):
        at = (region or next(f for f in forwards if not f.syncs)).at
        what = (
            f"the last of {len(several[0])} micro-batches is under no_sync(), which must be the one that synchronises"
        )
        return at, what
    return None


def _moved(rank: Rank) -> Iterator[Finding]:
    for move in rank.of(events.MovedAfterWrapping):
        if any(step.t > move.t for step in rank.of(events.Step)):
            what = f"a model inside DDP is moved from {move.source} to {move.target}, and trained after that"
            seen = "DDP has its hooks and buckets on the tensors from before: on a GPU nothing is synchronised any more"
            yield finding("moved-after-wrapping", what, move.at, seen)
            return


def _buffers(trace: Trace) -> Iterator[Finding]:
    ddp = {wrapper.n: wrapper.at for wrapper in trace.ranks[0].of(events.DDPInit)}
    local = next((b for b in trace.ranks[0].of(events.Buffers) if b.local_norms), None)
    if local:
        what = f"{len(local.local_norms)} BatchNorm layers use the statistics of each rank alone"
        layers = f"layers: {', '.join(local.local_norms[:3])}"
        yield finding("local-batch-norm", what, ddp.get(local.ddp), layers)
    for (number, n), ranks in trace.by_key(events.Buffers, lambda b: (b.ddp, b.n)).items():
        if difference := _difference([b.checksums for b in ranks]):
            name, count, rank = difference
            seen = f"before forward pass {n} {count} buffers of rank {rank} are not those of rank 0, first {name}"
            yield finding("drifting-buffers", "buffers differ between ranks", ddp.get(number), seen)
            return


def _training(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    ended = all(r.end and r.end.ok for r in trace.ranks)
    elsewhere = any(r.first(events.ProcessStarted) for r in trace.ranks)
    if ended and not elsewhere and not any(r.steps for r in trace.ranks):
        batches, backwards = len(rank.of(events.Batch)), len(rank.of(events.Backward))
        seen = f"{batches} batches, {backwards} backward passes, no optimizer step"
        yield finding("no-steps", "the script ended normally and took no step", rank.line(events.OptimizerInit), seen)
        return
    if any(step.without_gradients and step.not_in_model for step in rank.steps):
        what = "the optimizer's parameters are not those of the model that runs"
        yield finding("foreign-parameters", what, rank.line(events.OptimizerInit), "none of them has a gradient")
    yield from _unchanged(rank)


def _unchanged(rank: Rank) -> Iterator[Finding]:
    for start in (w for w in rank.of(events.Weights) if w.n == 0):
        later = [w.checksums for w in rank.of(events.Weights) if w.optimizer == start.optimizer and w.n and w.checksums]
        if len(later) >= 2 and all(checksums == start.checksums for checksums in later):
            at = next((o.at for o in rank.of(events.OptimizerInit) if o.n == start.optimizer), None)
            rates = sorted({lr for step in rank.of(events.Step) for lr in step.lr})
            seen = f"{len(start.checksums)} tensors are bit for bit what they were; learning rates {rates}"
            yield finding("nothing-changed", f"no parameter changed in {len(rank.steps)} steps", at, seen)
            return


def _gradients(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    steps = rank.of(events.Step)
    at = rank.line(events.DDPInit) if rank.first(events.DDPInit) else rank.line(events.OptimizerInit)
    if unused := next((found for _, found in trace.all(events.UnusedParameters)), None):
        what = "DDP fails, since parameters of the model take no part in the loss"
        yield finding("unused-parameters", what, at, f"at {unused.at}: no gradient for {', '.join(unused.names[:5])}")
        return
    missing = next((s.no_gradient_yet for s in reversed(steps) if s.no_gradient_yet is not None), [])
    if len(steps) >= 2 and missing and not any(s.without_gradients for s in steps):
        what = f"{len(missing)} parameters never get a gradient"
        yield finding("no-gradient", what, at, f"in {len(steps)} steps: {', '.join(missing[:3])}")
    if not_optimized := next((s.not_optimized for s in reversed(steps) if s.not_optimized), None):
        what = f"{len(not_optimized)} parameters get gradients but are in no optimizer"
        yield finding("untrained-parameters", what, rank.line(events.OptimizerInit), ", ".join(not_optimized[:3]))
    searches = [s.unused_search_empty for _, s in trace.all(events.Step) if s.unused_search_empty is not None]
    if len(searches) >= 2 * trace.world and all(searches) and not missing:
        what = "find_unused_parameters=True, but every parameter is used in every step"
        yield finding("needless-unused-search", what, at, f"{len(steps)} steps on {trace.world} ranks")
