"""Mixed precision: a scaler where there must be one, in the right order."""

from collections.abc import Iterator
from itertools import pairwise

from ..catalog import Finding, finding
from ..trace import Record, Trace, where


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    casts = rank.of("autocast")
    scaling = [r for r in rank.of("scaler") if r["op"] == "scale"]
    dtypes = {c["dtype"] for c in casts}
    half = next((s for s in rank.steps if s.get("half")), None)
    if half and not scaling:
        what = "the weights themselves are float16, and no gradient scaler is used"
        yield finding("fp16-without-scaler", what, where(half))
    if "float16" in dtypes and rank.steps and not scaling:
        at = where(next(c for c in casts if c["dtype"] == "float16"))
        yield finding("fp16-without-scaler", "autocast to float16, and no gradient scaler is used", at)
    if dtypes == {"bfloat16"} and scaling:
        yield finding("scaler-with-bf16", "a gradient scaler is used with bfloat16", where(scaling[0]))
    used = sorted({r["n"] for r in scaling})
    for before, after in pairwise(used):
        if max(r["t"] for r in scaling if r["n"] == before) < min(r["t"] for r in scaling if r["n"] == after):
            made = next((r for r in rank.of("scaler") if r["op"] == "new" and r["n"] == after), None)
            what = "a new gradient scaler takes the place of one that was in use"
            yield finding("rebuilt-scaler", what, where(made), f"{len(used)} scalers one after the other")
            break
    yield from _clipping(rank.records)


def _clipping(records: list[Record]) -> Iterator[Finding]:
    scaled = False
    for record in records:
        if record["kind"] == "scaler":
            scaled = {"scale": True, "unscale_": False, "step": False}.get(record["op"], scaled)
        elif record["kind"] == "clip" and scaled:
            what = "gradients are clipped while they are still multiplied by the scale"
            yield finding("clipped-before-unscaling", what, where(record))
            return
