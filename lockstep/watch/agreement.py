"""All ranks are at the same place: what each says about itself is the same everywhere."""

from typing import Any


def disagreement(ranks: list[dict[str, Any]]) -> tuple[str, int] | None:
    """The first fact on which some rank differs from rank 0, and that rank. Facts that only some have do not count."""
    for name, value in ranks[0].items():
        for number, other in enumerate(ranks):
            if name in other and other[name] != value:
                return name, number
    return None
