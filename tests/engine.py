"""Run the engine inside a test: flags in, weights and numbers out."""

import json
from pathlib import Path
from typing import Any

import tiny
from torch import Tensor

from lockstep import Trainer
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.recipe import introduce
from lockstep.run import settle


def trainer(world: World, recipe: str, flags: list[str]) -> Trainer:
    found = introduce(getattr(tiny, recipe), recipe.lower(), f"{tiny.__file__}:{recipe}")
    request = parse(found, ["--device", "cpu", *flags], "test")
    return Trainer(request, world, settle(request, world))


def train(world: World, recipe: str, flags: list[str]) -> dict[str, Tensor]:
    """The weights after the run."""
    run = trainer(world, recipe, flags)
    run.fit()
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
