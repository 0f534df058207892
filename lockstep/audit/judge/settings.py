"""Devices, waits, loading, printing, learning rate and environment."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from ..catalog import Finding, finding
from ..trace import SHARING, Rank, Site, Trace, where

DEAD = {
    "NCCL_TIMEOUT": "the time-out is an argument of init_process_group",
    "NCCL_TIMEOUT_MS": "the time-out is an argument of init_process_group",
    "TORCH_NCCL_TIMEOUT": "the time-out is an argument of init_process_group",
    "GLOO_TIMEOUT": "the time-out is an argument of init_process_group",
    "DDP_TIMEOUT": "the time-out is an argument of init_process_group",
    "TORCH_DISTRIBUTED_TIMEOUT": "the time-out is an argument of init_process_group",
    "NCCL_BACKEND": "the backend is an argument of init_process_group",
    "CUDA_VISIBLE_DEVICE": "the variable is CUDA_VISIBLE_DEVICES",
}
"""Variables people set that nothing reads."""
_USERS = ("WANDB_", "NCCL_", "TORCH_", "CUDA_", "OMP_", "HF_", "TOKENIZERS_", "GLOO_")


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world > 1:
        yield from _devices(trace)
        yield from _printing(trace)
        yield from _rate(trace)
    for rank in trace.ranks[:1]:
        yield from _waits(rank)
        yield from _loading(rank)
        yield from _environment(rank)


def _devices(trace: Trace) -> Iterator[Finding]:
    """Which GPU each rank works on: as it asked for on the CPU, or, on GPUs of their own, as its weights are."""
    real = [rank.steps[0].get("devices", []) if rank.steps else [] for rank in trace.ranks]
    start = trace.ranks[0].first("start")
    shares = start is not None and start["environment"].get("NCCL_HOSTID", "").startswith(SHARING)
    if real[0] and real[0][0].startswith("cuda") and len(set(map(tuple, real))) == 1 and not shares:
        at = where(trace.ranks[0].first("optimizer"))
        yield finding("shared-device", f"all {trace.world} ranks use {', '.join(real[0])}", at)
    if any(c["name"] == "CUDA_VISIBLE_DEVICES" for rank in trace.ranks for c in rank.of("setting")):
        return  # each rank may count its GPUs from 0
    used = [{d["index"] for d in rank.of("device") if d["op"] == "use"} for rank in trace.ranks]
    asked = [next((d for d in rank.of("device") if d["op"] == "device_ids"), None) for rank in trace.ranks]
    if all(len(u) == 1 for u in used) and len(set.union(*used)) == 1:
        at = where(next(d for d in trace.ranks[0].of("device") if d["op"] == "use"))
        yield finding("shared-device", f"all {trace.world} ranks use cuda:{used[0].pop()}", at)
        return
    for rank, ids, mine in zip(trace.ranks, asked, used, strict=True):
        if ids and mine and ids["index"] not in mine:
            what = f"rank {rank.number} works on cuda:{min(mine)}, but DDP was told cuda:{ids['index']}"
            yield finding("wrong-device", what, where(ids))
            return


def _printing(trace: Trace) -> Iterator[Finding]:
    counts = [[s["prints"] for s in rank.steps] for rank in trace.ranks]
    if all(len(c) >= 4 and sum(n > 0 for n in c) >= 0.8 * (len(c) - 1) for c in counts):
        seen = ", ".join(f"rank {n}: {sum(c)} lines" for n, c in enumerate(counts))
        yield finding("all-ranks-log", "every rank prints in every step", where(trace.ranks[0].first("print")), seen)


def _rate(trace: Trace) -> Iterator[Finding]:
    if trace.alone is None:
        return
    many, one = trace.ranks[0], trace.alone.ranks[0]
    if not many.steps or not one.steps or not many.steps[0]["lr"] or not one.steps[0]["lr"]:
        return
    rate = many.steps[0]["lr"][0] / max(one.steps[0]["lr"][0], 1e-30)
    if not _samples_a_step(many) or not _samples_a_step(one):
        return
    batch = trace.world * _samples_a_step(many) / _samples_a_step(one)
    if rate > 1.2 and batch < 1.05:
        what = f"on {trace.world} ranks the learning rate is {rate:g} times that of one, the global batch is the same"
        seen = f"lr {one.steps[0]['lr'][0]:g} → {many.steps[0]['lr'][0]:g}, samples a step ×{batch:g}"
        yield finding("scaled-lr", what, where(many.first("optimizer")), seen)


def _samples_a_step(rank: Rank) -> float:
    """Of the first step."""
    first = rank.steps[0]["t"]
    batches = rank.of("batch") or rank.of("input")
    return sum(b.get("rows", 0) for b in batches if b["t"] <= first)


def _waits(rank: Rank) -> Iterator[Finding]:
    counts: Counter[str] = Counter(place for s in rank.steps for place in s["waits"])
    for place, n in counts.items():
        file, line, what = place.rsplit(":", 2)
        if len(rank.steps) >= 4 and n >= 0.8 * (len(rank.steps) - 1):
            text = "the script waits for the device in every step"
            yield finding("waits", text, Site(file, int(line)), f"Tensor.{what} in {n} of {len(rank.steps)} steps")


def _loading(rank: Rank) -> Iterator[Finding]:
    steps = rank.steps
    loader = next((r for r in rank.of("loader") if r["workers"] == 0), None)
    if loader is None or len(steps) < 4:
        return
    wall = median(b["t"] - a["t"] for a, b in pairwise(steps))  # one step that the machine held up proves nothing
    loading = median(s["loading"] for s in steps[1:])
    if loading > max(0.5 * wall, 0.01):
        what = f"{100 * loading / wall:.0f} % of a step goes into loading, in the training process itself"
        yield finding("starved", what, where(loader), f"{1000 * loading:.0f} ms of {1000 * wall:.0f} ms")


def _environment(rank: Rank) -> Iterator[Finding]:
    start = rank.first("start")
    given: dict[str, Site | None] = dict.fromkeys(start["environment"] if start else {})
    changes = rank.of("setting")
    for name, at in [*given.items(), *((c["name"], where(c)) for c in changes)]:
        if name in DEAD:
            yield finding("dead-setting", f"{name} is read by nothing", at, DEAD[name])
    for change in changes:
        before = change["before"]
        if before is not None and before != change["value"] and change["name"].startswith(_USERS):
            secret = any(word in change["name"] for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
            values = "" if secret else f": {before} becomes {change['value']}"
            what = f"{change['name']} from the environment is overwritten{values}"
            yield finding("overwritten-setting", what, where(change))
