"""`lockstep bench scaling`: how much faster several CPU ranks are than one, with one thread each.

    lockstep bench scaling                                  two ranks, the presets of dit and vision
    lockstep bench scaling --nproc 8 --recipes dit

The same processes train alone and together in turn: rank 0 alone while the others wait, then all. So both meet the same
neighbours, and the ratio holds on a machine with other work, as far as there are cores for all ranks.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from .. import distributed, launch, registry
from ..distributed import World
from ..flags import parse
from ..options import Scaling
from ..rundir import resolve_run_dir
from ..trainer import Trainer

_PRESET = ("--preset", "laptop", "--device", "cpu", "--no_tensorboard", "--eval_every", "0")


def run(words: list[str]) -> int:
    """Exit status 1 if a recipe could not be measured."""
    options, flags = tyro.cli(
        Scaling, args=words, prog="lockstep bench scaling", use_underscores=True, return_unknown_args=True
    )
    names = options.recipes.split(",")
    for name in names:
        parse(registry.find(name), [*_PRESET, *flags], "lockstep bench scaling")  # before anything is started
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {name: _measure(name, flags, options) for name in names}
    table = Table(box=box.SIMPLE_HEAD, title=f"{options.nproc} CPU ranks of one thread, same micro-batch")
    for title in ("recipe", "1 rank", f"{options.nproc} ranks", "ratio", "ratio by processor time"):
        table.add_column(title, justify="left" if title == "recipe" else "right")
    for name, measured in found.items():
        table.add_row(name, *(_cells(measured) if measured else ["failed"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": asdict(options) | {"json": None}, "recipes": found}, indent=1))
    return int(any(measured is None for measured in found.values()))


def _cells(measured: dict[str, Any]) -> list[str]:
    alone, together = (f"{measured[kind]['samples_per_second']:,.1f} samples/s" for kind in ("alone", "together"))
    return [alone, together, f"{measured['ratio']:.2f}", f"{measured['ratio_by_processor_time']:.2f}"]


def _measure(recipe: str, flags: list[str], options: Scaling) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        result = Path(folder) / "result.json"
        task = json.dumps([recipe, flags, options.steps, options.rounds, folder])
        status = launch.start(options.nproc, ["-m", "lockstep.bench.scaling", task])
        return json.loads(result.read_text()) if status == 0 else None


def main() -> int:
    """Be one rank."""
    recipe, flags, steps, rounds, folder = json.loads(sys.argv[1])
    with distributed.session("cpu") as world:
        trainer = _trainer(recipe, flags, world, f"{folder}/together")
        alone = _trainer(recipe, flags, World(), f"{folder}/alone") if world.is_main else None
        times: dict[str, list[tuple[float, float]]] = {"alone": [], "together": []}
        for _ in range(rounds):
            if alone is not None:
                times["alone"].append(_times(alone.train_step, steps))
            world.barrier()
            own = _times(trainer.train_step, steps)
            ranks = world.gather(own)
            if world.is_main:
                times["together"].append((max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)))
        if world.is_main and alone is not None:
            samples = {"alone": alone.setup.batching.global_batch, "together": trainer.setup.batching.global_batch}
            found = _result(times, samples, world.size)
            (Path(folder) / "result.json").write_text(json.dumps(found))
            alone.step.close()
        trainer.step.close()
    return 0


def _trainer(recipe: str, flags: list[str], world: World, out: str) -> Trainer:
    request = parse(registry.find(recipe), [*_PRESET, *flags, "--out", out], "lockstep bench scaling")
    trainer = Trainer(request, world, resolve_run_dir(request.train.run, recipe, world))
    trainer.model.train()
    for _ in range(2):
        trainer.train_step()
    return trainer


def _times(train_step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Return the seconds of a step, by the clock and of this processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def _result(times: dict[str, list[tuple[float, float]]], samples: dict[str, int], world: int) -> dict[str, Any]:
    """Return samples per second of the best round, and of the median round by processor time."""
    found: dict[str, Any] = {}
    for kind, rounds in times.items():
        wall, cpu = min(wall for wall, _ in rounds), statistics.median(cpu for _, cpu in rounds)
        found[kind] = {"samples_per_second": samples[kind] / wall, "processor_seconds_per_sample": cpu / samples[kind]}
    found["ratio"] = found["together"]["samples_per_second"] / found["alone"]["samples_per_second"]
    one, many = (found[kind]["processor_seconds_per_sample"] for kind in ("alone", "together"))
    found["ratio_by_processor_time"] = world * one / many  # what it is with a core for each rank and no waiting
    return found


if __name__ == "__main__":
    from ..cli import exit_with  # ends a rank as a run's, with one message

    exit_with(main)
