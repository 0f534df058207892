from collections.abc import Callable, Iterator

import pytest

from multi.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n processes, started when first asked for and shared by all tests until one fails."""
    started: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size in started and not started[size].whole:
            started.pop(size).close()
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield get
    for world in started.values():
        world.close()
