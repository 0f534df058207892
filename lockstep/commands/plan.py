"""`lockstep plan RECIPE`: what a run needs, and how long it takes, on GPUs that need not be there.

lockstep plan dit --model DiT-XL/2 --batch_size 64 --gpu h200 --gpus 1,8 --nodes 2 --plot plan.png
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from .. import registry
from ..flags import Request, parse
from ..options import PlanFlags
from ..plan.hardware import GIB, GPUS, Gpu
from ..plan.measure import Measured, measure
from ..plan.memory import SHARDS, largest_micro_batch, memory_of
from ..plan.predict import Machines
from ..plan.scaling import Scaled, scale

NARROW = 79
"""Columns of a table that is not printed to a terminal."""


@dataclass
class Plan:
    """All that is printed, drawn, or written as JSON."""

    recipe: str
    gpu: Gpu
    precision: str
    measured: Measured
    runs: list[Scaled]
    shard: str = "none"
    correction: float = 1.0
    corrected_on: str = ""
    """The GPU on which real steps were made."""

    @property
    def first(self) -> Scaled:
        return self.runs[0]

    @property
    def largest(self) -> Scaled:
        return max(self.runs, key=lambda run: run.machines.world)


def run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        raise ValueError("say what to plan: lockstep plan RECIPE [flags]")
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would cut the batch
    recipe = registry.find(words[0])
    options, rest = tyro.cli(
        PlanFlags, args=words[1:], prog="lockstep plan RECIPE", use_underscores=True, return_unknown_args=True
    )
    request = parse(recipe, rest, f"lockstep plan {recipe.name}")
    plan = make_plan(request, options)
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        show(plan, Console(width=None if sys.stdout.isatty() else NARROW, highlight=False))
    if options.plot is not None:
        _draw(plan, options.plot)
        if not options.json:
            print(options.plot)
    return 0


def make_plan(request: Request, options: PlanFlags) -> Plan:
    """Return the plan of a run."""
    gpu = GPUS[options.gpu]
    if options.network is not None:
        gpu = replace(gpu, network=options.network * 1e9 / 8)
    hardware = request.train.hardware
    if hardware.precision == "fp64":
        raise ValueError("a plan is for bf16, fp16 or fp32, not fp64, which is for proofs on a CPU")
    if hardware.precision == "auto":
        hardware.precision = "bf16" if gpu.has_bf16 else "fp16"
    hardware.device = "auto"
    counts = sorted({int(word) for word in options.gpus.split(",")})
    machines = [Machines(gpu, count, options.nodes) for count in counts]
    measured = measure(request)
    runs = scale(measured, request.train, machines)
    plan = Plan(request.recipe.name, gpu, hardware.precision, measured, runs, hardware.shard)
    if options.measure:
        plan.corrected_on, plan.correction = _correction(request, plan)
        plan.runs = scale(measured, request.train, machines, plan.correction)
    return plan


def _correction(request: Request, plan: Plan) -> tuple[str, float]:
    """Return the name of this machine's GPU, and how much longer a real step takes on it than predicted."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--measure makes real steps on a GPU, and none is visible here; leave it out")
    from ..plan.real import measure_steps

    name = torch.cuda.get_device_name()
    kind = next((key for key, gpu in GPUS.items() if gpu.model in name), None)
    if kind is None:
        raise ValueError(f"--measure: this machine has a {name}, and plans know {', '.join(GPUS)}; leave it out")
    config = replace(request.train, data=replace(request.train.data))
    predicted = scale(plan.measured, config, [Machines(GPUS[kind])])[0]
    real = measure_steps(request)
    return real.device, real.computation / predicted.step.computation


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    measured, first = plan.measured, plan.first
    one = measured.at(first.batching.micro_batch)
    head = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    trained = "" if measured.trained == measured.parameters else f", {measured.trained:,} of them trained"
    rows = {
        "recipe": f"{plan.recipe}, {measured.dataset:,} training samples",
        "parameters": f"{measured.parameters:,}{trained}",
        "FLOPs": f"{one.flops / first.batching.micro_batch / 1e9:,.4g} G per sample, forward and backward",
        "on": f"{plan.gpu.title}, {plan.precision}, {'compiled' if first.compiled else 'not compiled'}, "
        + _links(plan, first.machines.nodes),
        "length": f"{first.days * 86_400 * first.samples_per_second:,.0f} samples, as the run has on one GPU",
    }
    for row in rows.items():
        head.add_row(*row)
    console.print(f"plan of {plan.recipe}: a prediction, nothing was trained", style="bold")
    console.print(head)
    for table in (_time_table(plan), _batch_table(plan), _memory_table(plan)):
        console.print()
        console.print(table)
    console.print()
    for note in notes(plan):
        console.print(f"note: {note}", soft_wrap=False)


def _links(plan: Plan, nodes: int) -> str:
    between = f", {plan.gpu.network * 8 / 1e9:g} Gbit/s between machines" if nodes > 1 else ""
    return f"{plan.gpu.link_name} ({plan.gpu.link / 1e9:g} GB/s){between}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _count(run: Scaled) -> str:
    machines = run.machines
    return f"{machines.nodes} × {machines.gpus}" if machines.nodes > 1 else str(machines.gpus)


def _time_table(plan: Plan) -> Table:
    columns = ("GPUs", "step", "all-reduce", "exposed", "samples/s", "speed-up", "run", "bound by")
    table = _table("time: milliseconds of a step, and of the whole run", *columns)
    for run in plan.runs:
        milliseconds = (f"{1e3 * seconds:.1f}" for seconds in (run.step.total, run.step.all_reduce, run.step.exposed))
        table.add_row(
            _count(run), *milliseconds, f"{run.samples_per_second:,.{int(run.samples_per_second < 100)}f}",
            f"{run.speed_up:.2f}×", _length(run.days), run.step.bound,
        )  # fmt: skip
    return table


def _length(days: float) -> str:
    """Return a length of time in the unit that suits it."""
    for unit, size in (("days", 1.0), ("h", 24.0), ("min", 1440.0)):
        if days * size >= 1.5:
            return f"{days * size:.1f} {unit}"
    return f"{days * 86_400:.0f} s"


def _batch_table(plan: Plan) -> Table:
    columns = ("GPUs", "batch_size", "accum.", "global", "lr", "lr linear", "lr sqrt", "or batch_size")
    table = _table("batch and learning rate", *columns)
    one = plan.first.batching.global_batch / plan.first.machines.world
    for run in plan.runs:
        b, same = run.batching, one / run.machines.world
        table.add_row(
            _count(run), f"{b.micro_batch}", f"{b.accumulation}", f"{b.global_batch:,}",
            *(f"{lr:.3g}" for lr in (run.lr, run.lr_linear, run.lr_sqrt)),
            f"{same:.0f}" if same.is_integer() else "–",
        )  # fmt: skip
    return table


def _memory_table(plan: Plan) -> Table:
    run, capacity = plan.largest, plan.gpu.memory
    world, micro = run.machines.world, run.batching.micro_batch
    shown = [(shard, count) for shard in SHARDS for count in (1, world) if (shard == "none") == (count == 1)]
    shown = [("none", 1), *(pair for pair in shown if pair[0] != "none" and world > 1)]
    title = f"memory of one of {world} GPU(s) in GiB, at batch_size {micro}, of {capacity / GIB:g}"
    names = {shard: f"--shard {shard}" for shard in SHARDS}
    table = _table(title, "", *(names[shard] for shard, _ in shown))
    found = [memory_of(plan.measured, micro, shard, count) for shard, count in shown]
    for part in ("weights", "gradients", "optimizer", "averages", "activations", "total"):
        table.add_row(part, *(f"{getattr(memory, part) / GIB:.2f}" for memory in found), end_section=part == "total")
    largest = [largest_micro_batch(plan.measured, capacity, shard, count) for shard, count in shown]
    table.add_row("largest batch_size", *(f"{count:,}" for count in largest))
    return table


def notes(plan: Plan) -> list[str]:
    """Return what a reader must know of these numbers, and what to do about them."""
    found, measured, run = _remedies(plan), plan.measured, plan.first
    if any(other.compiled != run.compiled for other in plan.runs):
        found.append("on several GPUs BatchNorm is synchronised and the model is not compiled (--sync_bn off: it is)")
    if measured.real:
        found.append(f"measured with real tensors on the CPU, since {measured.real}")
    found.append(
        "lr linear and lr sqrt scale that of one GPU with the global batch (--lr_scaling); `or batch_size` keeps the "
        "global batch, and so the lr, of one GPU"
    )
    found.append(
        f"corrected by {plan.correction:.2f}: real steps on a {plan.corrected_on}"
        if plan.corrected_on
        else "three compiled transformers on an H200, to which the constants were fitted, are within 10 %; eager steps "
        "were up to 34 % off, and other GPUs were not checked (docs/plan.md). On a GPU, --measure corrects it"
    )
    found.append(
        "memory is that of eager code, which compiled code mostly stays below; loading of data is not in it: "
        f"lockstep doctor {plan.recipe}"
    )
    return found


def _remedies(plan: Plan) -> list[str]:
    found, run = list[str](), plan.first
    largest = largest_micro_batch(plan.measured, plan.gpu.memory, plan.shard, run.machines.world)
    if largest < run.batching.micro_batch:
        found.append(
            f"batch_size {run.batching.micro_batch} does not fit: --batch_size {largest} --global_batch_size "
            f"{run.batching.global_batch} does, and trains the same"
            if largest
            else "not even one sample fits: --shard full, --activation_checkpointing blocks, or a smaller model"
        )
    bounds = {other.step.bound for other in plan.runs}
    if "all-reduce" in bounds:
        found.append("bound by all-reduce: a larger --batch_size or more accumulation makes fewer of them")
    if "launch" in bounds:
        found.append(
            "bound by launch: the GPU waits for the host, so a larger --batch_size costs little time; such predictions "
            "are rough"
        )
    return found


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON holds it: bytes, seconds, samples."""
    measured, micro, world = plan.measured, plan.largest.batching.micro_batch, plan.largest.machines.world
    runs = [
        {
            "gpus": run.machines.gpus, "nodes": run.machines.nodes, "world": run.machines.world,
            "batch_size": run.batching.micro_batch, "accumulation": run.batching.accumulation,
            "global_batch": run.batching.global_batch, "compiled": run.compiled,
            "lr": run.lr, "lr_linear": run.lr_linear, "lr_sqrt": run.lr_sqrt,
            "seconds": {**asdict(run.step), "total": run.step.total}, "bound": run.step.bound,
            "samples_per_second": run.samples_per_second, "speed_up": run.speed_up, "days": run.days,
        }
        for run in plan.runs
    ]  # fmt: skip
    memory = {
        shard: {
            **asdict(of),
            "total": of.total,
            "largest_batch_size": largest_micro_batch(measured, plan.gpu.memory, shard, world),
        }
        for shard in SHARDS
        for of in [memory_of(measured, micro, shard, world)]
    }
    one = measured.at(1)
    return {
        "prediction": True, "recipe": plan.recipe, "gpu": asdict(plan.gpu), "precision": plan.precision,
        "parameters": measured.parameters, "flops_per_sample": one.flops, "correction": plan.correction,
        "runs": runs, "memory": memory, "notes": notes(plan),
    }  # fmt: skip


def _draw(plan: Plan, path: Path) -> None:
    try:
        from ..plan.picture import draw

        memory = {
            shard: memory_of(plan.measured, run.batching.micro_batch, shard, run.machines.world)
            for run in [plan.largest]
            for shard in SHARDS
        }
        draw(f"{plan.recipe} on {plan.gpu.title} (predicted)", plan.runs, memory, plan.gpu.memory, path)
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'lockstep-train[plots]'") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another --plot") from None
