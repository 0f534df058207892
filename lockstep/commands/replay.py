"""`lockstep replay RUN --step N [--samples]`: redo a step of a run, and see whether it gives the same.

It starts from the nearest checkpoint before the step, on any number of ranks. The digests of an exact run are compared
with its history. `--samples` lists the samples of the step, each with its loss and gradient norm, the largest first: a
spike in a curve is explained by what caused it.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import distributed, launch, registry, rundir
from ..contact_sheet import save_sheet
from ..files import write_text
from ..options import ReplayFlags
from ..plots import read_metrics
from ..replay import Replay, Run, SampleLoss, pictures, sample_losses
from ..rundir import launch_of
from .trained import path_of, recorded_recipe


def run(words: list[str]) -> int:
    """Exit status 1 if the step gives something else than the run has recorded."""
    path = path_of(words, "replay")
    use = tyro.cli(ReplayFlags, args=words[1:], prog="lockstep replay RUN", use_underscores=True)
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would cut the batch
    chosen = open_run(path, use.recipe, use.step, use.device)
    hardware = chosen.request.train.hardware
    nproc = launch.process_count(use.nproc, hardware.device)
    if nproc > 1:
        return launch.start(nproc, ["-m", "lockstep", "replay", *words])
    with distributed.session(hardware.device, hardware.timeout) as world, tempfile.TemporaryDirectory() as scratch:
        replay = Replay(chosen, use.step, world, Path(scratch))
        n_steps = replay.trainer.setup.batching.n_steps
        if use.step > n_steps:
            raise ValueError(f"{chosen.folder} has {n_steps} steps; there is no step {use.step}")
        compared = min(chosen.next_recorded(use.step) or use.step, n_steps) if chosen.exact else use.step
        if world.is_main:
            _print_beginning(replay, use.step, compared)
        replay.advance(use.step - 1)
        samples = sample_losses(replay.trainer) if use.samples else []
        replay.advance(compared)
        status = _report(replay, use, compared, samples) if world.is_main else 0
        replay.trainer.step.close()
        del replay
    return status


def run_at(path: Path) -> Path:
    """Return the folder of the run that `path` is, or that it is a checkpoint of; a run may have none left."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder of a run")
    for folder in (path, *path.absolute().parents[:2]):
        if rundir.read_receipt(folder):
            return folder
    raise ValueError(f"{path} is not a run's folder: it has no receipt.json that can be read")


def open_run(path: Path, recipe: str | None, step: int, device: str | None = None) -> Run:
    """Return the run at `path` with its recipe, and the settings that `step` was made with."""
    folder = run_at(path)
    return Run.open(folder, registry.find(recipe or recorded_recipe(folder)), step, device)


def _print_beginning(replay: Replay, step: int, compared: int) -> None:
    """Print what is about to be done: it may take long."""
    world, start, count = replay.trainer.world.size, replay.start, compared - replay.first + 1
    print(
        f"step {step} of {replay.run.folder}, on {world} rank{'s' * (world > 1)}: {count} step{'s' * (count > 1)} from "
        f"{start.name if start else 'the beginning'}{f' up to step {compared}' * (compared > step)}"
    )
    for note in filter(None, [*replay.notes, *replay.run.other_settings(replay.first, compared), replay.run.problem]):
        print(f"  note: {note}")
    sys.stdout.flush()


def _report(replay: Replay, use: ReplayFlags, compared: int, samples: list[SampleLoss]) -> int:
    redone = replay.redone[use.step]
    print(f"  loss {redone.loss:.6g}, learning rate {redone.lr:.3g}, gradient norm {redone.gradient_norm:.4g}")
    if replay.run.exact:
        status = _compare(replay, compared, use.step)
    else:
        status = 0
        _expect(replay, use.step)
    if samples:
        _show_samples(replay, use, samples)
    return status


def _compare(replay: Replay, compared: int, step: int) -> int:
    """Print whether the replay is the run; exit status 1 if it is not."""
    differences = replay.differences(compared)
    if differences is None:
        print("  the run has left no digest to compare with, of this step or of a later one with these settings")
        return 0
    where = f"step {compared}" + f", the first from step {step} on that the run has recorded" * (compared > step)
    if not differences:
        names = [n for n in ("loss", "gradient", "weights") if n in replay.run.recorded(compared)]
        print(f"  the same bits as the run: {', '.join(names)} of {where}")
        return 0
    print(f"  NOT the bits of the run: {', '.join(differences)} of {where}")
    if "tiles" in differences:
        print("  the run has cut its tiles for lack of memory on the way; from there on it cannot be replayed exactly")
    return 1


def _expect(replay: Replay, step: int) -> None:
    """Print what may be expected of a replay of a run that is not exact."""
    count, ranks = step - replay.first + 1, launch_of(replay.run.receipt, step).get("world")
    print(
        "  the run is not exact, so there are no digests to compare with: samples and noise are the same, losses and "
        f"weights up to rounding, which grows with each step ({count} here)"
    )
    if ranks and ranks != replay.trainer.world.size:
        print(f"  the run had {ranks} rank(s) at step {step}: --nproc {ranks} comes nearest, above all with BatchNorm")
    logged = read_metrics(replay.run.folder / "metrics.jsonl").get("loss", {})
    if (loss := logged.get(step)) is not None:
        steps = step - max((other for other in logged if other < step), default=0)
        print(
            f"  the run has logged a loss of {loss:.6g} at step {step}" + f", a mean over {steps} steps" * (steps > 1)
        )


def _show_samples(replay: Replay, use: ReplayFlags, samples: list[SampleLoss]) -> None:
    """Print and draw the samples with the largest losses, and write all of them."""
    shown = samples[: use.show]
    drawn = pictures(replay.trainer, shown)
    _print_samples(samples, shown, [label for _, label in drawn])
    file = (Path(use.out) if use.out else replay.run.folder / "replay") / f"step-{use.step:08d}.json"
    sheet = [
        (image, [f"{one.index}: {label}", f"loss {one.loss:.4g}, grad {one.gradient_norm:.3g}"])
        for one, (image, label) in zip(shown, drawn, strict=False)  # without pictures there is nothing to draw
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps([asdict(one) for one in samples], indent=1) + "\n")
        print(file)
        if sheet:
            save_sheet(sheet, file.with_suffix(".png"))
            print(file.with_suffix(".png"))
    except OSError as error:
        raise ValueError(f"cannot write to {file.parent}: {error.strerror}; choose another --out") from None


def _print_samples(samples: list[SampleLoss], shown: list[SampleLoss], labels: list[str]) -> None:
    table = Table(title=f"the {len(shown)} largest losses of {len(samples)} samples, each alone", title_justify="left")
    for title in ("sample", "epoch", "loss", "share of the loss", "gradient norm"):
        table.add_column(title, justify="right")
    if labels:
        table.add_column("label")
    for i, one in enumerate(shown):
        numbers = f"{one.loss:.5g}", f"{100 * one.share:.1f} %", f"{one.gradient_norm:.4g}"
        table.add_row(str(one.index), str(one.epoch), *numbers, *map(Text, labels[i : i + 1]))
    Console(width=100).print(table)
    norms = sorted(one.gradient_norm for one in samples)
    middle = len(samples) // 2
    print(f"median loss {samples[middle].loss:.5g}, median gradient norm {norms[middle]:.4g}")
