"""`lockstep recipes`: list the installed recipes."""

from .. import registry


def run(words: list[str]) -> int:
    for name, point in sorted(registry.installed().items()):
        recipe = point.load()
        presets = f"  presets: {', '.join(recipe.presets)}" if recipe.presets else ""
        print(f"{name:12} {(recipe.__doc__ or '').strip().partition(chr(10))[0]}{presets}")
    return 0
