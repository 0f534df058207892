"""`lockstep data RECIPE FOLDER [flags]`: write a recipe's embedded data in the file formats of its field."""

from pathlib import Path

from .. import flags, registry
from ..recipe import EmbedsData


def run(words: list[str]) -> int:
    if words[1:] == ["--help"]:
        flags.parse(registry.find(words[0]), ["--help"], f"lockstep data {words[0]} FOLDER")
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise ValueError("say which data, and where to: lockstep data RECIPE FOLDER")
    found, folder = registry.find(words[0]), Path(words[1])
    recipe = found(flags.parse(found, words[2:], f"lockstep data {words[0]} FOLDER").options)
    if not isinstance(recipe, EmbedsData):
        raise ValueError(f"the recipe {words[0]} has no embedded data to write")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    print(recipe.write_data(folder))
    return 0
