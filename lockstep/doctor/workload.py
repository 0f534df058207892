"""With a recipe: does it fit, and does loading, computation or communication limit its speed?"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..evaluate import dataset_size
from ..flags import Request
from ..loader import Fetch, default_workers
from ..plan.measure import measure
from ..plan.memory import largest_micro_batch, memory_of
from ..plan.predict import BACKWARD
from ..plan.real import RealStep, measure_steps
from ..stream import Slice
from .check import Result, green, red, size, yellow

SPARE = 1.2
"""Loading is to be faster than the steps by this factor."""
_MOST_FLOPS = 2e12
"""Of a step that is tried on a CPU: it takes about a minute."""
NOTICED = 0.05
"""Share of a step that waiting for data or for an all-reduce may take unnoticed."""


@dataclass(frozen=True)
class Speed:
    """Of one step on one rank, in seconds."""

    computation: float
    """Forward, backward and update."""
    data_wait: float
    """What the loop waited for the loader."""
    loading: float
    """Time of one core to load the samples of the step."""
    all_reduce: float
    """Summing the gradients over `ranks`."""
    samples: int
    ranks: int
    cores: int
    """Of the machine."""
    workers: int
    on_cpu: bool

    @property
    def seconds(self) -> float:
        return self.computation + self.data_wait + self.exposed

    @property
    def exposed(self) -> float:
        """What of the all-reduce the backward pass cannot hide."""
        return max(0.0, self.all_reduce - BACKWARD * self.computation)

    @property
    def workers_needed(self) -> int:
        """Loader processes of each rank with which no step waits."""
        return math.ceil(SPARE * self.loading / self.computation)

    @property
    def cores_per_rank(self) -> int:
        return self.cores // self.ranks - 1


def check(request: Request, bandwidth: float | None, ranks: int, cores: int) -> list[Result]:
    """Return what the recipe needs and what limits it; `bandwidth` is that of the all-reduce between the ranks."""
    results, trains = _fits(request)
    if not trains:
        return results
    step = measure_steps(replace(request, smoke=None))
    loading = _loading(request) * step.samples
    reduce = 2 * (ranks - 1) / ranks * step.gradient_bytes / bandwidth if bandwidth and ranks > 1 else 0.0
    workers = request.train.data.num_workers
    on_cpu = step.device == "CPU"
    if workers is None:
        workers = default_workers(torch.device("cpu" if on_cpu else "cuda"))
    speed = Speed(step.computation, step.data_seconds, loading, reduce, step.samples, ranks, cores, workers, on_cpu)
    return [*results, *_times(step, speed), verdict(speed)]


def _fits(request: Request) -> tuple[list[Result], bool]:
    """Return whether the data set is large enough and the micro-batch fits; and whether steps can be tried here."""
    needed = measure(request)
    batch, data = request.train.data.batch_size, f"{needed.dataset:,} samples"
    if needed.dataset < batch:
        remedy = "is the path of the data right? else lower --batch_size"
        return [red("data set", f"{data}, fewer than the batch of {batch}", remedy)], False
    results = [green("data set", data)]
    memory, flops = memory_of(needed, batch).total, needed.at(batch).flops
    text = f"{needed.parameters:,} parameters, about {size(memory)} at batch_size {batch}"
    if not torch.cuda.is_available() or request.train.hardware.device == "cpu":
        results.append(green("model", text))
        if flops > _MOST_FLOPS:
            what = f"{flops / 1e12:,.1f} TFLOP for {batch} samples are too many for a CPU: no step was tried"
            results.append(yellow("step", what, "check it beside a GPU, or with fewer samples or a --preset"))
        return results, flops <= _MOST_FLOPS
    total = torch.cuda.mem_get_info()[1]
    largest = largest_micro_batch(needed, total)
    if largest < batch:
        remedy = f"--batch_size {max(1, largest)}, and --global_batch_size {batch} to train the same"
        return [*results, yellow("model", f"{text}, and the GPU has {size(total)}", remedy)], False
    return [*results, green("model", f"{text} of {size(total)}; up to {largest:,} fit")], True


def _loading(request: Request, limit: float = 3.0) -> float:
    """Return the seconds in which one core loads, augments and collates one sample."""
    recipe = request.instance or request.recipe(request.options)
    recipe.optim = request.train.optim
    data = recipe.dataset("train")
    fetch, batch, count = Fetch.of(recipe, data, request.train.data.seed), request.train.data.batch_size, 0
    order = np.random.default_rng(0).permutation(min(dataset_size(data), 10_000)).astype(np.int64)
    started = time.perf_counter()
    while time.perf_counter() - started < limit and count < 10 * batch:
        index = order[(count + np.arange(batch)) % len(order)]
        (micro,) = fetch.__getitems__((Slice(np.zeros_like(index), index), 0, True))
        if micro.error:
            raise ValueError(micro.error)
        count += batch
    return (time.perf_counter() - started) / count


def _times(step: RealStep, speed: Speed) -> list[Result]:
    memory = f", {size(step.memory)} allocated" if step.memory else ""
    loaded = speed.samples / speed.loading
    return [
        green("step", f"{1e3 * step.seconds:,.1f} ms for {step.samples} samples on one {step.device}: "
                      f"{step.samples / step.seconds:,.4g} samples/s{memory}"),
        green("loader", f"{loaded:,.4g} samples/s in one process; the run has {speed.workers} worker(s) for each rank"),
    ]  # fmt: skip


def verdict(speed: Speed) -> Result:
    """Return what limits the speed of training, and the flag to change."""
    name, wait = "verdict", speed.data_wait / speed.seconds
    if wait > NOTICED and wait >= speed.exposed / speed.seconds:
        return yellow(name, f"data-bound: {wait:.0%} of a step is waiting for data", _remedy_for_data(speed))
    if speed.exposed > NOTICED * speed.seconds:
        share = speed.exposed / speed.seconds
        remedy = "fewer all-reduces: a larger --batch_size, or --gradient_accumulation_steps; a larger model hides them"
        return yellow(name, f"communication-bound: {share:.0%} of a step on {speed.ranks} ranks is all-reduce", remedy)
    needed = "" if speed.on_cpu and not speed.workers else f"; --num_workers {max(1, speed.workers_needed)} suffice"
    return green(name, f"compute-bound: {1 - wait:.0%} of a step is computation{needed}")


def _remedy_for_data(speed: Speed) -> str:
    if speed.workers_needed <= max(0, speed.cores_per_rank):
        return f"--num_workers {speed.workers_needed}"
    what = f"each of {speed.ranks} rank(s) needs {speed.workers_needed} loader process(es), on {speed.cores} core(s)"
    cheaper = "make samples cheaper (smaller or cached images, less augmentation), or take a machine with more cores"
    if speed.on_cpu:
        return f"{what} that also train: {cheaper}"
    return f"--num_workers {max(1, speed.cores_per_rank)}; {what}: {cheaper}"


def ranks_of(request: Request) -> int:
    """Return how many ranks the run has on this machine: those asked for, or one on each GPU."""
    nproc, gpus = request.train.hardware.nproc, torch.cuda.device_count()
    if request.train.hardware.device == "cpu" or not gpus:
        return int(nproc) if nproc.isdigit() else 1
    return int(nproc) if nproc.isdigit() and nproc != "1" else gpus
