"""Run the engine inside a test: flags in, weights and numbers out."""

import json
from pathlib import Path
from typing import Any

import tiny
from torch import Tensor

from lockstep import Trainer
from lockstep.distributed import World
from lockstep.flags import Request, parse
from lockstep.registry import register
from lockstep.rundir import find_config, resolve_run_dir


def trainer(world: World, recipe: str, flags: list[str]) -> Trainer:
    found = register(getattr(tiny, recipe), recipe.lower(), f"{tiny.__file__}:{recipe}")
    return trainer_for(parse(found, ["--device", "cpu", *flags], "test", find_config), world)


def trainer_for(request: Request, world: World) -> Trainer:
    """A trainer in the folder that the request asks for."""
    return Trainer(request, world, resolve_run_dir(request.train.run, request.recipe.name, world))


def train(world: World, recipe: str, flags: list[str]) -> dict[str, Tensor]:
    """The weights after the run."""
    run = trainer(world, recipe, flags)
    run.fit()
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
