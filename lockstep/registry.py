"""How a recipe is found: by the name an installed package gives it, or as path/to/file.py:Class."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from .nearest import nearest
from .recipe import Recipe

ENTRY_POINTS = "lockstep.recipes"
_specs: dict[type[Recipe], str] = {}


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the recipes that installed packages declare, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def find(name: str) -> type[Recipe]:
    """Return the recipe class called `name`: an installed one, or `path/to/file.py:Class`."""
    if file_of(name):
        return _from_file(name)
    points = installed()
    if name not in points:
        raise ValueError(f"there is no recipe {name!r}{nearest(name, points)}; `lockstep recipes` lists them")
    return register(points[name].load(), name, name)


def file_of(name: str) -> Path | None:
    """Return the file that a recipe is loaded from, and that is executed on the way; None for an installed one."""
    return Path(name.partition(":")[0]) if ".py" in name else None


def _from_file(name: str) -> type[Recipe]:
    file, _, wanted = name.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {file} to load a recipe from")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # what the file imports is beside it, as in `python file.py`
    spec.loader.exec_module(module)
    classes = {
        k: v
        for k, v in vars(module).items()
        if isinstance(v, type) and issubclass(v, Recipe) and v.__module__ == path.stem
    }
    if not wanted and len(classes) == 1:
        wanted = next(iter(classes))
    if wanted not in classes:
        have = ", ".join(classes) or "none"
        raise ValueError(f"say which recipe of {file} to train, as {file}:Class; the file defines: {have}")
    return register(classes[wanted], path.stem, f"{path}:{wanted}")


def register(recipe: type[Recipe], name: str, spec: str) -> type[Recipe]:
    """Set under which name a recipe runs, unless it has one, and by which `spec` another process finds it."""
    recipe.name = recipe.name or name
    _specs[recipe] = spec
    return recipe


def register_script(recipe: type[Recipe], script: Path) -> type[Recipe]:
    """Register a class that a script trains: an installed recipe, or one from the file that defines it."""
    for name, point in installed().items():
        module, _, attribute = point.value.partition(":")
        if attribute == recipe.__name__ and f"{recipe.__module__}.".startswith(f"{module}."):
            return register(recipe, name, name)
    file = Path(getattr(sys.modules.get(recipe.__module__), "__file__", None) or script).resolve()
    return register(recipe, script.resolve().parent.name, f"{file}:{recipe.__name__}")


def spec_of(recipe: type[Recipe]) -> str:
    """Return what `find` finds this class by; empty for one that was never registered."""
    return _specs.get(recipe, "")
