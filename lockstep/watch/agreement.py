"""All ranks agree: the facts that each reports are the same everywhere."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..distributed import RunFailed


class OutOfLockstep(RunFailed):
    """The ranks no longer train one model on one stream of data."""


def disagreement(ranks: list[dict[str, Any]]) -> tuple[str, int] | None:
    """Return the first fact in which some rank differs from rank 0, and that rank; facts a rank lacks do not count."""
    for name, value in ranks[0].items():
        for number, other in enumerate(ranks):
            if name in other and other[name] != value:
                return name, number
    return None


def minority(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value is not that of more than half of them; none if no value has such a majority."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, other in enumerate(values) if other != value] if 2 * count > len(values) else []
