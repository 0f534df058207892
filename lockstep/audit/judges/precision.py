"""Mixed precision: a scaler where there must be one, in the right order."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from ..catalog import Finding, finding
from ..events import Autocast, Clip, Scaler, Step
from ..model import Rank, Trace


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    casts = {cast.dtype: cast for cast in reversed(rank.of(Autocast))}
    scaling = [s for s in rank.of(Scaler) if s.op == "scale"]
    half = next((s for s in rank.steps if s.fp16_weights), None)
    if half and not scaling:
        what = "the weights themselves are float16, and no gradient scaler is used"
        yield finding("fp16-without-scaler", what, half.at)
    if "float16" in casts and rank.steps and not scaling:
        what = "autocast to float16, and no gradient scaler is used"
        yield finding("fp16-without-scaler", what, casts["float16"].at)
    if set(casts) == {"bfloat16"} and scaling:
        yield finding("scaler-with-bf16", "a gradient scaler is used with bfloat16", scaling[0].at)
    used = sorted({s.n for s in scaling})
    for before, after in pairwise(used):
        if max(s.t for s in scaling if s.n == before) < min(s.t for s in scaling if s.n == after):
            at = next((s.at for s in rank.of(Scaler) if s.op == "__init__" and s.n == after), None)
            what = "a new gradient scaler replaces one that was in use"
            yield finding("rebuilt-scaler", what, at, f"{len(used)} scalers one after the other")
            break
    unmoved = [step.unmoved for step in rank.of(Step) if step.unmoved is not None]
    if unmoved and median(unmoved) > 0.5:
        at = next(step.at for step in rank.of(Step) if step.unmoved is not None)
        what = "the weights are bfloat16, without a copy in float32: most steps are too small to change them"
        seen = f"{100 * median(unmoved):.0f} % of the weights with a gradient are left as they were in a step"
        yield finding("bf16-weights", what, at, seen)
    yield from _clipping(rank)
    yield from _clipped_per_rank(rank, trace.world)


def _clipped_per_rank(rank: Rank, world: int) -> Iterator[Finding]:
    """Gradients that are clipped by the norm of a part of them."""
    if world == 1 or not (first := rank.first(Clip)):
        return
    summed = sum(step.clipped_before_sum for step in rank.steps)
    partial = [u for u in rank.updates if len(u.backwards) >= 2 and u.clips == len(u.backwards) and not all(u.syncs)]
    if shards := next((clip for clip in rank.of(Clip) if clip.of_shards), None):
        what = "clip_grad_norm_ of torch.nn.utils clips each rank's shards by their own norm"
        yield finding("clipped-per-rank", what, shards.at, "model.clip_grad_norm_(...) of FSDP takes the norm of all")
    elif summed >= 2:
        what = "each rank clips its own gradients before they are averaged"
        yield finding("clipped-per-rank", what, first.at, f"in {summed} of {len(rank.steps)} steps")
    elif len(partial) >= 2:
        micro = len(partial[0].backwards)
        what = f"gradients are clipped after each of {micro} micro-batches, before they are averaged"
        yield finding("clipped-per-rank", what, first.at, f"in {len(partial)} steps")


def _clipping(rank: Rank) -> Iterator[Finding]:
    scaled = False
    for event in rank.events:
        if isinstance(event, Scaler):
            scaled = {"scale": True, "unscale_": False, "step": False}.get(event.op, scaled)
        elif isinstance(event, Clip) and scaled:
            what = "gradients are clipped while they are still multiplied by the scale"
            yield finding("clipped-before-unscaling", what, event.at)
            return
