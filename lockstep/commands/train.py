"""`lockstep train RECIPE [flags]`: train, on as many processes as the flags ask for."""

import signal
from contextlib import suppress

from .. import distributed, flags, launch, registry, rundir
from ..outcome import Outcome
from ..recipe import Recipe
from ..trainer import Trainer
from ..watch.hang import HangWatch


def run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        raise ValueError("say what to train: lockstep train RECIPE [flags]; `lockstep recipes` lists the recipes")
    return train_recipe(registry.find(words[0]), words[1:], ["-m", "lockstep", "train", *words])


def train_recipe(recipe: type[Recipe], words: list[str], command: list[str]) -> int:
    """Train as `words` say; `command` starts the same as one of several processes."""
    request = flags.parse(recipe, words, f"lockstep train {recipe.name}", rundir.find_config)
    hardware = request.train.hardware
    nproc = launch.process_count(hardware.nproc, hardware.device)
    if nproc > 1:
        return launch.start(nproc, command, hardware.max_restarts)
    with (
        distributed.session(hardware.device, hardware.timeout, hardware.local_rank) as world,
        rundir.open_run_dir(request.train.run, recipe.name, world) as run_dir,
        HangWatch(world, run_dir.path, hardware.hang_timeout, hardware.timeout),
    ):
        outcome = Trainer(request, world, run_dir).fit()
    if world.is_main:
        with suppress(OSError):  # no reader: the run is complete all the same
            _print_outcome(outcome, recipe)
    return _exit_status(outcome)


def _print_outcome(outcome: Outcome, recipe: type[Recipe]) -> None:
    if outcome.stopped_by not in (None, "patience"):
        print(f"stopped by {outcome.stopped_by} after step {outcome.step}, everything is saved; go on with:")
        print(f"    lockstep train {registry.spec_of(recipe)} --resume {outcome.folder}")
        return
    if outcome.stopped_by:
        print(f"stopped early at step {outcome.step}: no better evaluation for a while")
    for path in (*outcome.files, outcome.folder / "checkpoints" / f"step-{outcome.step:08d}"):
        print(path)
    for name in ("model.pth", "model.safetensors"):
        print(outcome.folder / name)


def _exit_status(outcome: Outcome) -> int:
    if outcome.stopped_by in (None, "patience"):
        return 0
    return 130 if outcome.stopped_by == signal.SIGINT.name else launch.REQUEUE
