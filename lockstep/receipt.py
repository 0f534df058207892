"""The receipt: what is about to happen, in one table, before step 1."""

import json
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from . import trust
from .batching import Batching
from .batchnorm import has_batch_norm
from .config import Optim
from .distributed import World
from .exact import Exactness
from .files import printable, write_text
from .loader import is_iterable
from .optim import Update
from .provenance import launch_facts, launches_of
from .recipe import Describes
from .registry import file_of, spec_of
from .rundir import RunDir, read_receipt
from .setup import Setup
from .state import TrainState
from .trackers import Screen


@dataclass
class Receipt:
    """Rows of (what, value), and notes: settings without effect, and whatever else a user may not expect."""

    facts: dict[str, Any]
    """For programs: how the recipe is found again, the global batch, which launch this is, and all settings."""
    rows: list[tuple[str, str]]
    notes: list[str]

    def show(self) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title="receipt", title_justify="left")
        for row in self.rows:
            table.add_row(*(Text(printable(text)) for text in row))  # as text: a folder may be called m[/b]x
        console = Screen(file=sys.stdout, width=None if sys.stdout.isatty() else 1000, highlight=False)
        with suppress(OSError):  # no reader: receipt.json has it all
            console.print(table)
            for note in self.notes:
                console.print(printable(f"  note: {note}"), markup=False)
            console.print()

    def write(self, path: Path) -> None:
        """Write it for programs; the recipe's file, which this process has executed, is from now on a trusted one."""
        if file := file_of(self.facts["spec"]):
            trust.record(file)
        write_text(path, json.dumps({**self.facts, **dict(self.rows), "notes": self.notes}, indent=2) + "\n")


def make_receipt(setup: Setup, state: TrainState, data: dict[str, list[str]], gradients: str) -> Receipt:
    """Return the receipt of a run that begins, or resumes, now.

    `data` has digests of some samples of each split, `gradients` says how much of them each rank sends.
    """
    request, run_dir = setup.request, setup.run_dir
    before = read_receipt(run_dir.path).get("launches", []) if run_dir.resumes_own_run else []
    facts = {
        "spec": spec_of(request.recipe),
        "global_batch": setup.batching.global_batch,
        "tiles": setup.batching.tiles,
        "n_steps": setup.batching.n_steps,
        "run_id": _run_id(run_dir),
        "launch_ids": run_dir.launch_ids,
        "launches": launches_of(
            before, launch_facts(setup.world, request, state.progress.step, run_dir.resume_from, data)
        ),
        "settings": request.settings(),
    }
    broken = [f"no longer exact: {why}" for why in (state.exactness.breaks if state.exactness else [])]
    notes = [*run_dir.notes, *_resume_notes(run_dir.resume_from, facts), *broken]
    rows = _rows(setup, state, gradients)
    return Receipt(facts, rows, [*notes, *_notes(setup, state.model, state.update.own_optimizer)])


def _run_id(run_dir: RunDir) -> str:
    """Return by which name services such as W&B know the run: kept when it is resumed, and nobody else's."""
    before = read_receipt(run_dir.path) if run_dir.resumes_own_run else {}
    if before and "run_id" not in before:  # a run of an older version was known by its folder
        return "".join(c if c.isalnum() else "-" for c in str(run_dir.path))[-60:]
    return str(before.get("run_id") or uuid.uuid4().hex)


def _resume_notes(resume_from: Path | None, facts: dict[str, Any]) -> list[str]:
    """Return in what a resumed run differs from what it was before."""
    before = read_receipt(resume_from.parents[1]) if resume_from else {}
    notes, old, new = list[str](), before.get("settings", {}), facts["settings"]
    if before.get("spec", facts["spec"]) != facts["spec"]:
        notes.append(f"the run was trained with the recipe {before['spec']} so far")
    changed = [name for name in new if old and old.get(name) != new[name]]
    if changed:
        changes = ", ".join(f"{name} is {new[name]} (was {old.get(name, 'not set')})" for name in changed)
        notes.append(f"changed since the run was last started: {changes}")
    return notes


def _rows(setup: Setup, state: TrainState, gradients: str) -> list[tuple[str, str]]:
    b, world, resume_from = setup.batching, setup.world, setup.run_dir.resume_from
    model, data = type(state.model).__name__, ""
    if isinstance(setup.recipe, Describes):
        model, data = setup.recipe.describe_model(state.model), setup.recipe.describe_data("train")
    rows = [
        ("recipe", f"{setup.request.recipe.name}: {model}"),
        ("parameters", f"{sum(p.numel() for p in state.model.parameters()):,}"),
        ("data", data or ("iterable, of unknown length" if b.dataset is None else f"{b.dataset:,} samples")),
        ("devices", _devices(world)),
        ("world", f"{world.size}, backend {world.backend}, time-out {setup.config.hardware.timeout:g} s"),
        ("global batch", _global_batch(b)),
        (
            "length",
            f"{b.n_steps:,} steps" + "".join(f" = {epochs:.2f} epochs" for epochs in b.epochs(b.n_steps).values()),
        ),
        ("learning rate", _learning_rate(setup.config.optim, state.update)),
        ("optimizer", f"{state.update.kinds()}, averages: {[e.decay for e in state.emas] or 'none'}"),
        ("precision", f"{setup.precision.name}, {'compiled' if setup.compiled else 'not compiled'}"),
        *([("gradients", gradients)] if gradients else []),
        ("exact", _exactness(state.exactness, b) + _spot_checks(setup)),
        *([("sharded", _SHARDED[setup.sharded])] if setup.sharded else []),
        *([("recomputed", setup.recomputed)] if setup.recomputed else []),
        ("folder", str(setup.run_dir.path)),
    ]
    return rows + ([("resumes", f"{resume_from} at step {state.progress.step}")] if resume_from else [])


_SHARDED = {
    "optimizer": "optimizer state and averages: each rank has those of some parameters; they are on one rank only, so "
    "they are not compared between ranks",
    "full": "each rank has some rows of every parameter, of its gradient, optimizer state and average; these are on "
    "one rank only, so they are not compared between ranks, and there are no spot checks and no history",
}


def _global_batch(b: Batching) -> str:
    if b.tiles is not None:
        return f"{b.tiles} tile(s) of up to {b.micro_batch} = {b.global_batch}, on {b.world} rank(s)"
    return f"{b.micro_batch} micro-batch × {b.accumulation} accumulation × {b.world} world = {b.global_batch}"


def _exactness(exactness: Exactness | None, batching: Batching) -> str:
    if exactness is None:
        return "no: another number of ranks gives the same up to rounding (--exact: to the bit)"
    kernels = ", ".join(f"{name} {version}" for name, version in exactness.environment.items())
    return (
        f"{batching.tiles} tile(s) of {batching.micro_batch}, on {kernels}; another of these, or a tile cut for lack "
        "of memory, gives other bits"
    )


def _spot_checks(setup: Setup) -> str:
    if setup.different_kernels and setup.world.size > 1:
        return f"; no spot checks, since ranks differ in {', '.join(setup.different_kernels)}"
    every = setup.spot_check_every
    return f"; spot check every {every} step(s): each rank repeats a tile of another one" if every else ""


def _learning_rate(settings: Optim, update: Update) -> str:
    rule = "" if settings.lr_scaling == "none" else f" = {settings.lr:g} scaled {settings.lr_scaling}"
    warmup = "" if update.schedule.own else f", {update.schedule.warmup} warm-up steps"
    return f"{update.learning_rates()}{rule}, {update.schedule.kind}{warmup}"


def _notes(setup: Setup, model: nn.Module, own_optimizer: bool) -> list[str]:
    request = setup.request
    without_effect = setup.config.without_effect(setup.facts(own_optimizer))
    notes = [f"{name} has no effect: {why}" for name, why in without_effect.items() if name in request.given]
    if request.smoke:
        steps = setup.batching.n_steps
        notes.insert(0, f"LOCKSTEP_SMOKE={request.smoke}: a trial run of {steps} steps, micro-batch 2")
    if setup.config.hardware.distributed and setup.world.size == 1:
        notes.append("distributed training was asked for, but there is one process; start it with torchrun or --nproc")
    if not setup.batching.divides_evenly:
        notes.append("the global batch does not divide evenly: some micro-batches are smaller by one")
    if is_iterable(setup.data):
        notes += _iterable_notes(setup)
    return notes + (_batch_norm_notes(setup) if has_batch_norm(model) else [])


def _iterable_notes(setup: Setup) -> list[str]:
    notes = [
        "the data set is iterable: every rank reads all of it, in its own order, and keeps its share; it must yield "
        "the same items on all ranks and whenever it is read"
    ]
    if setup.batching.dataset is None:
        notes.append(
            "it has no __len__, so it is not checked that an epoch uses each sample once; give it one, or an index "
            "(docs/data.md)"
        )
    return notes


def _batch_norm_notes(setup: Setup) -> list[str]:
    if setup.in_tiles:
        return [f"BatchNorm has the statistics of each tile of {setup.batching.micro_batch} samples"]
    if setup.world.size > 1 and not setup.sync_bn:
        return ["BatchNorm has statistics of its own on every rank (--sync_bn off): results depend on the world"]
    notes = []
    if setup.sync_bn and setup.world.size > 1 and setup.world.device.type == "cuda":
        notes.append("not compiled: BatchNorm statistics are synchronised over the ranks")
    if setup.batching.accumulation > 1:
        notes.append("BatchNorm sees one micro-batch at a time: with accumulation it differs from one large batch")
    return notes


def _devices(world: World) -> str:
    if world.device.type == "cuda":
        return f"{world.size} × {torch.cuda.get_device_name(world.device)}"
    return f"{world.size} CPU process{'es' if world.size > 1 else ''}, {torch.get_num_threads()} thread(s) each"
