"""`lockstep sample RUN [--n 64 ...]`: generate samples on all ranks and write them as the recipe does."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import tyro

from ..distributed import World
from ..options import UseFlags
from ..recipe import Generates
from .trained import TrainedRun, on_ranks, path_of, recipe_of


def run(words: list[str]) -> int:
    path = path_of(words, "sample")
    recipe = recipe_of(path, words)
    if not isinstance(recipe, Generates):
        raise ValueError(f"the recipe {type(recipe).__name__} generates nothing")
    settings_type = _settings_type(recipe)
    target = dataclasses.make_dataclass(
        "Sample", [("n", int, 64), ("settings", settings_type, dataclasses.field(default_factory=settings_type)),
                   ("use", UseFlags, dataclasses.field(default_factory=UseFlags))],
    )  # fmt: skip
    flags: Any = tyro.cli(
        target, args=words[1:], prog="lockstep sample RUN", use_underscores=True, config=(tyro.conf.OmitArgPrefixes,)
    )
    if flags.n < 1:
        raise ValueError(f"n is at least 1, not {flags.n}")
    settings, use = dataclasses.asdict(flags.settings), flags.use

    def act(trained: TrainedRun, world: World) -> list[Path]:
        samples = trained.evaluator.generate(flags.n, settings, use.batch_size)
        if samples is None:
            return []
        assert isinstance(trained.recipe, Generates)
        details = "".join(f"-{k}{v:g}" for k, v in settings.items() if isinstance(v, int | float))
        name = f"step-{trained.step:08d}-n{flags.n}{details}-seed{use.seed}-{trained.weights}"
        return trained.recipe.save_samples(samples, trained.result_folder("samples", use.out) / name)

    return on_ranks(["sample", *words], path, use, act)


def _settings_type(recipe: Generates) -> type:
    """Return a dataclass of the keyword arguments of the recipe's `sample`: they are flags."""
    parameters = list(inspect.signature(recipe.sample).parameters.values())[3:]
    fields: list[Any] = [
        (p.name, p.annotation, p.default) for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return dataclasses.make_dataclass("settings", fields)
