"""Lockstep as a library: train in a script, a test or a notebook, without the command line."""

import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import distributed, flags, registry, rundir
from .config import TrainConfig
from .distributed import World
from .exact import kernels_restored
from .outcome import Outcome
from .recipe import Recipe
from .trainer import Trainer
from .watch.hang import HangWatch


def fit(recipe: type[Recipe] | Recipe, config: TrainConfig | None = None, **settings: Any) -> Outcome:
    """Train in this process and return how it ended; what the command line would exit with is raised.

    `recipe` is a class, or an instance with its options. The settings are a whole `config`, or single ones by their
    flag names on top of the recipe's own defaults: `fit(Mine, n_steps=100, out="runs/mine")`. In a process that
    torchrun has started, this is one rank of several.
    """
    kind = recipe if isinstance(recipe, type) else type(recipe)
    if not registry.spec_of(kind):
        registry.register_script(kind, Path(sys.argv[0]))
    request = flags.request_for(kind, config, settings, rundir.find_config)
    if not isinstance(recipe, type):
        request = dataclasses.replace(request, options=recipe.options, instance=recipe)
    hardware = request.train.hardware
    if hardware.nproc not in ("1", "auto") and "RANK" not in os.environ:
        raise ValueError(_how_to_start(kind, hardware.nproc))
    dtype = torch.get_default_dtype()
    try:
        with (
            kernels_restored(),
            distributed.session(hardware.device, hardware.timeout, hardware.local_rank) as world,
            rundir.open_run_dir(request.train.run, kind.name, world) as run_dir,
            HangWatch(world, run_dir.path, hardware.hang_timeout, hardware.timeout, ends_process=world.size > 1),
        ):
            return Trainer(request, world, run_dir).fit()
    finally:
        torch.set_default_dtype(dtype)


def _how_to_start(recipe: type[Recipe], nproc: str) -> str:
    """Return what to do instead of asking fit() for several processes."""
    text = f"fit() trains in this process, not in nproc = {nproc}: "
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return text + f"start the script with torchrun --nproc_per_node={nproc}, or the recipe with `lockstep train`"
    return text + (
        f"other processes cannot see a notebook. Save {recipe.__name__} in a file, with %%writefile mine.py as the "
        f"first line of its cell, and run !lockstep train mine.py:{recipe.__name__} --nproc {nproc}"
    )


@contextmanager
def world(device: str = "auto", timeout: float = 600.0, hang_timeout: float = 300.0) -> Iterator[World]:
    """Join the process group that torchrun has described, yield this rank's world, and leave the group.

    Without torchrun the world has one rank. `timeout`: seconds after which a rank that waits for the others gives up.
    `hang_timeout`: seconds without progress on any rank after which the stacks of all ranks are written to hang.txt and
    the processes end; 0 for never. With several ranks an exception ends the process: the rank that failed first prints
    it, the others end too.
    """
    joined = distributed.connect(device, timeout)
    try:
        with HangWatch(joined, Path(), hang_timeout, timeout, ends_process=joined.size > 1), joined.closing:
            yield joined
        distributed.disconnect(joined)
    except BaseException as error:
        if joined.size == 1:
            raise
        _exit(error)


def _exit(error: BaseException) -> NoReturn:
    """End this rank: what Lockstep itself has found is one line, anything else has its traceback."""
    from .cli import exit_with  # a library does not need the command line

    def end() -> int:
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                raise distributed.RunFailed(error.code)
            return error.code or 0
        if isinstance(error, Exception) and not _is_own(error):
            script = error.__traceback__.tb_next if error.__traceback__ else None  # without the line of `world`
            raise distributed.RunFailed.of(error, script)
        raise error

    exit_with(end)
    raise AssertionError("exit_with does not return")


def _is_own(error: Exception) -> bool:
    """Return whether an error is Lockstep's own or comes from a collective, rather than from the script."""
    if isinstance(error, distributed.RunFailed) or distributed.lost_contact(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(frames[-1].filename).parent == Path(__file__).parent
