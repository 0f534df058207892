"""All ranks agree: the facts that each reports are the same everywhere."""

from typing import Any


def disagreement(ranks: list[dict[str, Any]]) -> tuple[str, int] | None:
    """Return the first fact in which some rank differs from rank 0, and that rank; facts a rank lacks do not count."""
    for name, value in ranks[0].items():
        for number, other in enumerate(ranks):
            if name in other and other[name] != value:
                return name, number
    return None
