"""`lockstep test RUN`: the recipe's metrics on its test set, the same on any number of ranks."""

import json
from pathlib import Path

import tyro

from ..distributed import World
from ..options import UseFlags
from ..recipe import Tests
from .trained import TrainedRun, on_ranks, path_of


def run(words: list[str]) -> int:
    path = path_of(words, "test")
    use = tyro.cli(UseFlags, args=words[1:], prog="lockstep test RUN", use_underscores=True)

    def act(trained: TrainedRun, world: World) -> list[Path]:
        data = trained.recipe.dataset("test")
        if data is None:
            raise ValueError("the data of this recipe have no test set")
        trained.compare_ranks("test", data)
        values, sums = trained.evaluator.evaluate(data, use.batch_size, testing=True)
        if not world.is_main:
            return []
        folder = trained.result_folder("test", use.out)
        (folder / "metrics.json").write_text(json.dumps(values, indent=2) + "\n")
        for name, value in values.items():
            print(f"{name} {value:.6g}")
        details = trained.recipe.save_test(sums, values, folder) if isinstance(trained.recipe, Tests) else []
        return [folder / "metrics.json", *details]

    return on_ranks(["test", *words], path, use, act)
