"""The result of a check."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")


@dataclass(frozen=True)
class Result:
    """What a check has found."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def green(name: str, found: str) -> Result:
    return Result(name, "green", found)


def yellow(name: str, found: str, remedy: str) -> Result:
    """Return the result of what works, but slowly, or not for long."""
    return Result(name, "yellow", found, remedy)


def red(name: str, found: str, remedy: str) -> Result:
    """Return the result of what does not work."""
    return Result(name, "red", found, remedy)


def attempt(name: str, check: Callable[[], Result | Iterable[Result]]) -> list[Result]:
    """Return the results of a check; one that fails by itself is yellow, and the others go on."""
    try:
        found = check()
    except ValueError as error:
        return [red(name, str(error), "")]
    except Exception as error:  # a driver, a file system, a container: anything may be missing
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return [yellow(name, f"could not be checked: {text}", "look into it if something else is wrong")]
    return [found] if isinstance(found, Result) else list(found)


def size(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"
