"""What exact sums, deterministic kernels and the history cost: the same step with and without --exact, in turns.

python benchmarks/exact.py [--recipe dit] [--tiles 1,4] [--rounds 5] [--steps 10] [--profile] [flags of lockstep train]

With --profile it also says where the time goes: the kernels whose time differs most, and how long a GPU is idle.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lockstep.bench.clock import covered
from lockstep.distributed import World, pick_device
from lockstep.exact import choose_kernels
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer
from lockstep.watch.drift import start_checksums


def make(recipe: str, flags: list[str], folder: Path) -> Trainer:
    request = parse(find(recipe), [*flags, "--out", str(folder), "--no_tensorboard"], "exact")
    world = World(device=pick_device(request.train.hardware.device, 0))
    run = Trainer(request, world, resolve_run_dir(request.train.run, recipe, world))
    run.model.train()
    return run


def seconds(run: Trainer, steps: int) -> float:
    """Of one step, with the kernels of this run: the settings are those of the whole process."""
    choose_kernels(run.config.hardware.exact, run.world.device, run.setup.compiled)
    for count in (2, steps):
        if run.world.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            run.train_step()
            run.progress.step += 1
        if run.world.device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def history_seconds(run: Trainer, rounds: int) -> float:
    """Of the digests of one step: gradients are as large as weights, so these are read twice."""
    tensors, times = run.model.state_dict(), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        pending = [start_checksums(tensors) for _ in range(2)]
        if run.world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        del pending
    return statistics.median(times[1:])


def profile(run: Trainer, steps: int) -> tuple[Counter[str], float]:
    """Milliseconds per step of each kernel (on a CPU: operator), and of all together where none overlap."""
    seconds(run, 1)
    on_gpu, steps = run.world.device.type == "cuda", min(steps, 5)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            run.train_step()
            run.progress.step += 1
        if on_gpu:
            torch.cuda.synchronize()
    times: Counter[str] = Counter()
    events = [e for e in profiler.events() or () if (e.device_type == DeviceType.CUDA) == on_gpu]
    for event in events:
        span = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        times[event.name] += span / 1000 / steps
    return times, covered((e.time_range.start, e.time_range.end) for e in events) / 1000 / steps


def print_profile(plain: Trainer, exact: Trainer, steps: int) -> None:
    (before, busy_before), (after, busy_after) = profile(plain, steps), profile(exact, steps)
    print(f"busy: {busy_before:.2f} ms of a plain step, {busy_after:.2f} ms of an exact one; kernels that differ most:")
    names = sorted(before.keys() | after.keys(), key=lambda name: -abs(after[name] - before[name]))
    for name in names[:15]:
        print(f"  {after[name] - before[name]:+8.3f} ms  {before[name]:8.3f} -> {after[name]:8.3f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="dit")
    parser.add_argument("--tiles", default="1,4", help="numbers of tiles, each of --batch_size, in a global batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    asked, flags = parser.parse_known_args()
    runs: dict[str, Trainer] = {}
    with tempfile.TemporaryDirectory() as parent:
        tile = parse(find(asked.recipe), flags, "exact").train.data.batch_size
        for tiles in map(int, asked.tiles.split(",")):
            cut = [*flags, "--batch_size", str(tile), "--global_batch_size", str(tile * tiles)]
            for name, more in (("plain", []), ("exact", ["--exact"])):
                runs[f"{name}, {tiles} tile(s)"] = make(asked.recipe, [*cut, *more], Path(parent) / f"{name}{tiles}")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(asked.rounds + 1):
            for name, run in runs.items():
                times[name].append(seconds(run, asked.steps))
        medians = {name: statistics.median(found[1:]) for name, found in times.items()}
        for name in [n for n in runs if n.startswith("exact")]:
            ratio = medians[name] / medians[name.replace("exact", "plain")] - 1
            print(
                f"{asked.recipe}, {name}: {1000 * medians[name]:.2f} ms per step, {100 * ratio:+.1f} % of the plain one"
            )
            digests, every = history_seconds(runs[name], asked.rounds), runs[name].config.hardware.history_every
            share = digests / every / medians[name]
            print(
                f"{asked.recipe}, {name}: {1000 * digests:.2f} ms for the digests of a step, {100 * share:.2f} % of a "
                f"step with --history_every {every}"
            )
            if asked.profile:
                print_profile(runs[name.replace("exact", "plain")], runs[name], asked.steps)
        print(json.dumps({"device": str(run.world.device), "seconds": medians}))
        runs.clear()
        del run
        gc.collect()


if __name__ == "__main__":
    main()
