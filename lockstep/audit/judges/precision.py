"""Mixed precision: a scaler where there must be one, in the right order."""

from collections.abc import Iterator
from itertools import pairwise

from ..catalog import Finding, finding
from ..events import Autocast, Clip, Scaler
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
    yield from _clipping(rank)


def _clipping(rank: Rank) -> Iterator[Finding]:
    scaled = False
    for event in rank.events:
        if isinstance(event, Scaler):
            scaled = {"scale": True, "unscale_": False, "step": False}.get(event.op, scaled)
        elif isinstance(event, Clip) and scaled:
            what = "gradients are clipped while they are still multiplied by the scale"
            yield finding("clipped-before-unscaling", what, event.at)
            return
