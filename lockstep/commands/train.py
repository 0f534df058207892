"""`lockstep train RECIPE [flags]`: train, on as many processes as the flags ask for.

`lockstep train --resume RUN` takes the recipe from the run.
"""

import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

from .. import cluster, distributed, flags, launch, registry, rundir, trust
from ..distributed import World
from ..outcome import Outcome
from ..recipe import Recipe
from ..trainer import Trainer
from ..watch.hang import HangWatch
from .trained import recorded_recipe, value_of


def run(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        spec, words = words[0], words[1:]
    else:
        spec = _resumed_recipe(words)
    return train_recipe(registry.find(spec), words, ["-m", "lockstep", "train", spec, *words])


def _resumed_recipe(words: list[str]) -> str:
    """Return the recipe of the run that `--resume` names."""
    run = value_of("--resume", words)
    if run in ("auto", "latest"):
        raise ValueError(f"--resume {run} is the newest run of a recipe: lockstep train RECIPE --resume {run}")
    if run is None:
        raise ValueError(
            "say what to train: lockstep train RECIPE [flags], or lockstep train --resume RUN; `lockstep recipes` "
            "lists the recipes"
        )
    return recorded_recipe(rundir.run_folder(Path(run)), f"lockstep train {{}} --resume {shlex.quote(run)}")


def train_recipe(recipe: type[Recipe], words: list[str], command: list[str] | None) -> int:
    """Train as `words` say; `command` starts the same as one of several processes; None if nothing can."""
    request = flags.parse(recipe, words, f"lockstep train {recipe.name}", rundir.find_config)
    hardware = request.train.hardware
    cluster.adopt(os.environ, hardware.nproc)
    if command is not None and cluster.wants_torchrun(os.environ):
        cluster.become_torchrun(command)
    nproc = launch.process_count(hardware.nproc, hardware.device)
    if nproc > 1:
        if command is None:
            raise ValueError(f"--nproc {nproc} runs a script in {nproc} processes, and this is no file: save it as one")
        return launch.start(nproc, command, hardware.max_restarts)
    with (
        distributed.session(hardware.device, hardware.timeout, hardware.local_rank) as world,
        rundir.open_run_dir(request.train.run, recipe.name, world) as run_dir,
        HangWatch(world, run_dir.path, hardware.hang_timeout, hardware.timeout),
    ):
        outcome = Trainer(request, world, run_dir).fit()
    if world.is_main:
        with suppress(OSError):  # no reader: the run is complete all the same
            _print_outcome(outcome, recipe, world)
    return _exit_status(outcome)


def _print_outcome(outcome: Outcome, recipe: type[Recipe], world: World) -> None:
    if outcome.stopped_by not in (None, "patience"):
        print(f"stopped by {outcome.stopped_by} after step {outcome.step}, everything is saved; go on with:")
        print(f"    {_resume_command(outcome.folder, recipe, world)}")
        return
    if outcome.stopped_by:
        print(f"stopped early at step {outcome.step}: no better evaluation for a while")
    for path in (*outcome.files, outcome.folder / "checkpoints" / f"step-{outcome.step:08d}"):
        print(path)
    for name in ("model.pth", "model.safetensors"):
        print(outcome.folder / name)


def _resume_command(folder: Path, recipe: type[Recipe], world: World) -> str:
    """Return what continues a run on as many ranks."""
    spec = registry.spec_of(recipe)
    file = registry.file_of(spec)
    words = ["lockstep", "train", *([] if file is None or trust.is_trusted(file) else [spec]), "--resume", str(folder)]
    if world.size == int(os.environ.get("LOCAL_WORLD_SIZE", world.size)):
        return shlex.join([*words, "--nproc", str(world.size)])
    return f"torchrun ... -m {shlex.join(words)}    with the --nnodes and --nproc_per_node of before"


def _exit_status(outcome: Outcome) -> int:
    if outcome.stopped_by in (None, "patience"):
        return 0
    return 130 if outcome.stopped_by == signal.SIGINT.name else launch.REQUEUE
