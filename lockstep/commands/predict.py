"""`lockstep predict RUN FILE_OR_FOLDER`: predictions in the order of the input, on any number of ranks."""

from pathlib import Path

import tyro

from ..distributed import World
from ..options import UseFlags
from ..recipe import Predicts
from .trained import TrainedRun, on_ranks, path_of

SHOWN = 10
"""Files that are named; the first are the most useful ones."""


def run(words: list[str]) -> int:
    path = path_of(words, "predict")
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError("say what to predict: lockstep predict RUN FILE_OR_FOLDER [flags]")
    source = Path(words[1])
    use = tyro.cli(UseFlags, args=words[2:], prog="lockstep predict RUN FILE_OR_FOLDER", use_underscores=True)
    if not source.exists():
        raise ValueError(f"there is nothing to predict at {source}")

    def act(trained: TrainedRun, world: World) -> list[Path]:
        recipe = trained.recipe
        if not isinstance(recipe, Predicts):
            raise ValueError(f"the recipe {type(recipe).__name__} predicts nothing")
        data = recipe.predict_dataset(source)
        trained.compare_ranks("predict", data)
        predictions = trained.evaluator.predict(data, use.batch_size)
        if not world.is_main:
            return []
        folder = trained.result_folder("predict", use.out)
        files = recipe.save_predictions(predictions, data, folder)
        print(recipe.describe_predictions(predictions, data))
        print(f"by the {trained.weights} weights of step {trained.step:,}; all files are in {folder}, among them:")
        return files[:SHOWN]

    return on_ranks(["predict", *words], path, use, act)
