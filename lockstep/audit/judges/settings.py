"""Devices, waits, loading, printing, learning rate and environment."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from ..catalog import DEAD_SETTINGS, Finding, finding
from ..events import Batch, Device, Environment, ModelInput, OptimizerInit, PassStart, Print, Start
from ..model import Rank, Trace
from ..source import Site

_USERS = ("WANDB_", "NCCL_", "TORCH_", "CUDA_", "OMP_", "HF_", "TOKENIZERS_", "GLOO_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def judge(trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    if trace.world > 1:
        yield from _devices(trace)
        yield from _printing(trace)
        yield from _rate(trace)
    yield from _waits(rank)
    yield from _loading(rank)
    yield from _environment(rank)


def _devices(trace: Trace) -> Iterator[Finding]:
    """Which GPU each rank works on: by what it asked for, or, on GPUs of their own, by where its weights are."""
    first = trace.ranks[0]
    start = first.first(Start)
    real = {tuple(rank.steps[0].devices) if rank.steps else () for rank in trace.ranks}
    devices = next(iter(real))
    if len(real) == 1 and devices and devices[0].startswith("cuda") and not (start and start.shares_gpu):
        what = f"all {trace.world} ranks use {', '.join(devices)}"
        yield finding("shared-device", what, first.line(OptimizerInit))
    if any(change.name == "CUDA_VISIBLE_DEVICES" for _, change in trace.all(Environment)):
        return  # each rank may count its GPUs from 0
    used = [{d.index for d in rank.of(Device) if d.op == "use"} for rank in trace.ranks]
    if all(len(u) == 1 for u in used) and len(set.union(*used)) == 1:
        at = next(d.at for d in first.of(Device) if d.op == "use")
        yield finding("shared-device", f"all {trace.world} ranks use cuda:{used[0].pop()}", at)
        return
    for rank, mine in zip(trace.ranks, used, strict=True):
        given = next((d for d in rank.of(Device) if d.op == "device_ids"), None)
        if given and mine and given.index not in mine:
            what = f"rank {rank.number} works on cuda:{min(mine)}, but DDP was given cuda:{given.index}"
            yield finding("wrong-device", what, given.at)
            return


def _printing(trace: Trace) -> Iterator[Finding]:
    counts = [[s.prints for s in rank.steps] for rank in trace.ranks]
    if all(_nearly_always(sum(n > 0 for n in c), len(c)) for c in counts):
        seen = ", ".join(f"rank {n}: {sum(c)} lines" for n, c in enumerate(counts))
        steps, prints = trace.ranks[0].steps, trace.ranks[0].of(Print)
        lines = Counter(line.at for line in prints if steps[0].t < line.t < steps[-1].t)
        yield finding("all-ranks-log", "every rank prints in every step", lines.most_common(1)[0][0], seen)


def _nearly_always(times: int, steps: int) -> bool:
    return steps >= 4 and times >= 0.8 * (steps - 1)


def _rate(trace: Trace) -> Iterator[Finding]:
    if trace.single is None:
        return
    many, one = trace.ranks[0], trace.single.ranks[0]
    before, after = (rank.steps[0].lr[:1] if rank.steps else [] for rank in (one, many))
    samples, samples_of_one = _first_step_samples(many), _first_step_samples(one)
    if not before or not after or not samples or not samples_of_one:
        return
    rate, batch = after[0] / max(before[0], 1e-30), trace.world * samples / samples_of_one
    if rate > 1.2 and batch < 1.05:
        what = f"on {trace.world} ranks the learning rate is {rate:g} times that of one, the global batch is the same"
        seen = f"lr {before[0]:g} → {after[0]:g}, samples per step ×{batch:g}"
        yield finding("scaled-lr", what, many.line(OptimizerInit), seen)


def _first_step_samples(rank: Rank) -> int:
    batches: list[Batch] | list[ModelInput] = rank.of(Batch) or rank.of(ModelInput)
    return sum(b.rows for b in batches if rank.steps and b.t <= rank.steps[0].t)


def _waits(rank: Rank) -> Iterator[Finding]:
    counts = Counter((file, line, method) for step in rank.steps for file, line, method in step.waits)
    for (file, line, method), n in counts.items():
        if _nearly_always(n, len(rank.steps)):
            seen = f"Tensor.{method} in {n} of {len(rank.steps)} steps"
            yield finding("waits", "the script waits for the device in every step", Site(file, line), seen)


def _loading(rank: Rank) -> Iterator[Finding]:
    steps = rank.steps
    start = next((s for s in rank.of(PassStart) if s.workers == 0), None)
    if start is None or len(steps) < 4:
        return
    wall = median(b.t - a.t for a, b in pairwise(steps))  # one step that the machine held up proves nothing
    ends, seconds = [s.t for s in steps], [0.0] * (len(steps) + 1)
    for batch in rank.of(Batch):
        seconds[bisect(ends, batch.t)] += batch.loading
    loading = median(seconds[1:-1])
    if loading > max(0.5 * wall, 0.01):
        what = f"{100 * loading / wall:.0f} % of a step goes into loading, in the training process itself"
        yield finding("starved", what, start.at, f"{1000 * loading:.0f} ms of {1000 * wall:.0f} ms")


def _environment(rank: Rank) -> Iterator[Finding]:
    start = rank.first(Start)
    given: dict[str, Site | None] = dict.fromkeys(start.environment if start else {})
    changes = rank.of(Environment)
    for name, at in [*given.items(), *((change.name, change.at) for change in changes)]:
        if name in DEAD_SETTINGS:
            yield finding("dead-setting", f"{name} is read by nothing", at, DEAD_SETTINGS[name])
    for change in changes:
        if change.before is not None and change.before != change.value and change.name.startswith(_USERS):
            secret = any(word in change.name for word in _SECRET)
            values = "" if secret else f": {change.before} becomes {change.value}"
            what = f"{change.name} from the environment is overwritten{values}"
            yield finding("overwritten-setting", what, change.at)
