"""A trained run, opened: what `lockstep sample`, `test` and `predict` have in common."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .. import checkpoint, distributed, flags, launch, precision, registry, rundir, trust
from ..distributed import World
from ..evaluate import Evaluator, samples_of
from ..options import UseFlags
from ..recipe import Recipe
from ..watch.data import DataWatch


@dataclass
class TrainedRun:
    """A run with its recipe, and its model in an evaluator."""

    folder: Path
    recipe: Recipe
    evaluator: Evaluator
    step: int
    weights: str
    """Whether the model has `plain` or averaged (`ema`) weights."""

    def compare_ranks(self, name: str, dataset: Any) -> None:
        """Raise OutOfLockstep unless all ranks have the same samples."""
        evaluator = self.evaluator
        for note in DataWatch(evaluator.world, {name: samples_of(dataset)}, evaluator.seed).compare_splits():
            if evaluator.world.is_main:
                print(f"lockstep: {note}", file=sys.stderr)

    def result_folder(self, name: str, out: str | None) -> Path:
        """Create and return the folder for results."""
        folder = Path(out) if out else self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def path_of(words: list[str], command: str) -> Path:
    """Return the run that the first word names."""
    if not words or words[0].startswith("-"):
        raise ValueError(f"say which run: lockstep {command} RUN [flags]")
    return Path(words[0])


def recipe_of(path: Path, words: list[str]) -> Recipe:
    """Return the recipe of a run with its options, before the flags in `words` can be parsed: some are the recipe's."""
    return _load_request(path, value_of("--recipe", words))[0]


def value_of(flag: str, words: list[str]) -> str | None:
    """Return the value of a flag, before all others can be parsed; None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    value: str | None = parser.parse_known_args(words)[0].value
    return value


def _load_request(path: Path, given: str | None) -> tuple[Recipe, tuple[float, ...]]:
    folder = rundir.run_folder(path)
    found = registry.find(given or recorded_recipe(folder))
    request = flags.parse(found, ["--config", str(folder / "config.yaml")], "lockstep")
    return found(request.options), request.train.optim.ema_decay


def recorded_recipe(folder: Path, remedy: str = "--recipe {}") -> str:
    """Return what the receipt names as the recipe of a run; a ValueError for a file that the user may not know.

    `remedy` is how the user can name the recipe.
    """
    try:
        spec = str(json.loads((folder / "receipt.json").read_text())["spec"])
    except (ValueError, KeyError, TypeError):
        spec = ""
    if not spec:
        name = remedy.format("NAME_OR_FILE.py:Class")
        raise ValueError(f"the receipt of {folder} names no recipe; say which it is: {name}")
    file = registry.file_of(spec)
    if file and not file.is_file():
        raise ValueError(
            f"{folder} was trained with {spec}, and there is no such file; say where it is: {remedy.format('FILE.py')}"
        )
    if file and not trust.is_trusted(file):
        raise ValueError(
            f"{folder} was trained with {spec}, a file that you have not trained with on this machine. To use the run, "
            f"the code in this file is executed; if you trust it: {remedy.format(shlex.quote(spec))}"
        )
    return spec


@dataclass
class LoadedRun:
    """A checkpoint of a run, and a model with its weights."""

    recipe: Recipe
    model: nn.Module
    saved: checkpoint.Checkpoint
    weights: str
    """Whether they are `plain` or averaged (`ema`)."""


def load_run(path: Path, use: UseFlags, world: World) -> LoadedRun:
    """Return a run, or one of its checkpoints, on the CPU; rank 0 chooses the checkpoint for all."""
    found = checkpoint.resolve(path)
    chosen: Path = world.on_main(lambda: choose_checkpoint(found, use.checkpoint))
    saved = checkpoint.load(chosen)
    averages = [name for name in saved.tensors if name.startswith("ema-")]
    recipe, decays = _load_request(path, use.recipe)
    if use.weights == "ema" and not averages:
        raise ValueError(f"{chosen} has no averaged weights; use --weights plain")
    name = f"ema-{decays[0]}" if averages and use.weights != "plain" else "model"
    model = recipe.model()
    checkpoint.restore_model(model, saved.tensors[name], str(chosen))
    return LoadedRun(recipe, model, saved, "plain" if name == "model" else "ema")


def open_run(path: Path, use: UseFlags, world: World, autocast: AbstractContextManager[Any]) -> TrainedRun:
    """Return a run, or one of its checkpoints, with its model on this rank's device."""
    loaded, folder = load_run(path, use, world), rundir.run_folder(path)
    evaluator = Evaluator(loaded.recipe, loaded.model.to(world.device), world, autocast, use.seed)
    return TrainedRun(folder, loaded.recipe, evaluator, loaded.saved.step, loaded.weights)


def choose_checkpoint(found: Path, which: str) -> Path:
    """Return one of the checkpoints of a folder: the last good one, or that of a name."""
    if checkpoint.is_checkpoint(found):
        return found
    if which != "last":
        return found / which
    newest = checkpoint.newest(found, lambda text: print(text, file=sys.stderr))
    if newest is None:
        raise ValueError(f"there is no good checkpoint in {found}")
    return newest.path


def on_ranks(words: list[str], path: Path, use: UseFlags, act: Callable[[TrainedRun, World], list[Path]]) -> int:
    """Call `act` on all ranks that the flags ask for, and print the files it returns; `words` are the command."""
    nproc = launch.process_count(use.nproc, use.device)
    if nproc > 1:
        return launch.start(nproc, ["-m", "lockstep", *words])
    with distributed.session(use.device) as world:
        autocast = precision.choose(use.hardware(), world.device).autocast
        for file in act(open_run(path, use, world, autocast), world):
            print(file)
    return 0
