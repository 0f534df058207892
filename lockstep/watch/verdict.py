"""Which rank is wrong: what the ranks report about a step that is checked, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .agreement import minority
from .drift import differing
from .repair import find_sources

Checksums = NDArray[np.int64]
"""Of a tile: the checksum of each parameter's gradient, then the bits of the numbers that it adds to the loss."""


@dataclass
class Report:
    """What one rank knows about a step."""

    repeated: tuple[int, Checksums | None]
    """A tile of another rank, and what this rank got for it; None if its memory did not suffice."""
    tiles: dict[int, Checksums]
    """What it got for its own tiles."""
    own_sum: Checksums
    """Of its gradients, added up over its tiles, right before they are summed over the ranks."""
    global_sum: Checksums
    """Of the sum over all ranks, as this rank has received it."""
    fits: bool
    """Whether its gradients fit the grid; where some do not, integers have no right sum, and the step is redone."""
    state: dict[str, int]
    """A checksum of each tensor that must be equal on all ranks."""


@dataclass
class Dispute:
    """A tile about which two ranks disagree; all ranks have then read and repeated it."""

    tile: int
    claims: dict[int, Checksums]
    """What the two got at first, by rank."""
    again: list[Checksums | None]
    """What each rank gets now."""
    data: list[str]
    """Of each rank, a digest of the samples that it has read."""


@dataclass
class Fault:
    """What is wrong in a step: `text` goes on after "at step N"."""

    text: str
    ranks: list[int] = field(default_factory=list)
    """The ranks that are known to be wrong."""
    sources: dict[str, int] | None = field(default_factory=dict)
    """Of each tensor that is to be copied, the rank that has the right one; None if no majority shows which."""
    in_recipe: bool = False
    """Whether the recipe or its data is the cause, not a device; to repeat the step does not help."""


def judge(reports: Sequence[Report], names: Sequence[str]) -> Fault | list[int] | None:
    """Return what is wrong, or the tiles about which two ranks disagree; None if there is nothing."""
    if fault := _judge_state([report.state for report in reports]):
        return fault
    tiles = {number: found for report in reports for number, found in report.tiles.items()}
    repeated = [(tile, found) for tile, found in (report.repeated for report in reports) if found is not None]
    if disputed := [tile for tile, found in repeated if not np.array_equal(found, tiles[tile])]:
        return disputed
    return _judge_sums(reports, names) if all(report.fits for report in reports) else None


def _judge_state(states: list[dict[str, int]]) -> Fault | None:
    if not (difference := differing(states)):
        return None
    name, count, _ = difference
    wrong = minority([state.get(name) for state in states])
    whose = (
        f"those of rank {_join(wrong)} are not those of the others" if wrong else "no majority shows which are wrong"
    )
    text = f"the ranks hold different weights, optimizer state or averages: {count} tensor(s), first {name}; {whose}"
    return Fault(text, wrong, find_sources(states))


def _judge_sums(reports: Sequence[Report], names: Sequence[str]) -> Fault | None:
    own_sums = [np.sum(list(report.tiles.values()), 0)[: len(names)] for report in reports]
    for rank, (report, expected) in enumerate(zip(reports, own_sums, strict=True)):
        if not np.array_equal(report.own_sum, expected):
            where = _first_difference(report.own_sum, expected, names)
            return Fault(f"rank {rank} has added up the gradients of its tiles wrongly ({where})", [rank])
    expected = np.sum(own_sums, 0)
    wrong = [rank for rank, report in enumerate(reports) if not np.array_equal(report.global_sum, expected)]
    if not wrong:
        return None
    where = _first_difference(reports[wrong[0]].global_sum, expected, names)
    if len(wrong) == len(reports):
        return Fault(f"the all-reduce has summed the gradients wrongly, and no rank can be named ({where})")
    return Fault(f"the all-reduce has given a wrong sum of gradients to rank {_join(wrong)} ({where})", wrong)


def settle(disputes: Sequence[Dispute], names: Sequence[str]) -> Fault:
    """Return who was wrong about tiles. A rank that is wrong often is so about two: its own, and one it repeats."""
    for dispute in disputes:
        if fault := _judge_data(dispute):
            return fault
    verdicts = [(dispute, wrong_ranks(dispute.claims, dispute.again)) for dispute in disputes]
    wrong = set[int]().union(*(ranks for _, ranks in verdicts))
    if len(wrong) == len(disputes[0].again):
        return Fault(
            "a tile does not have the same bits on all ranks, and no single rank is wrong: a loss must depend on "
            "weights, samples and rng alone, not on the rank, on other random numbers or on what earlier calls have "
            "left behind",
            in_recipe=True,
        )
    dispute = next((dispute for dispute, ranks in verdicts if ranks), disputes[0])
    (a, first), (b, second) = sorted(dispute.claims.items())
    where = _first_difference(first, second, names)
    if wrong:
        return Fault(f"rank {_join(sorted(wrong))} has computed tile {dispute.tile} wrongly ({where})", sorted(wrong))
    return Fault(
        f"rank {a} and rank {b} get different bits for tile {dispute.tile}, and each the same again ({where}): one of "
        "them computes wrongly, and a third rank would show which; or the loss depends on the rank"
    )


def wrong_ranks(claims: Mapping[int, Checksums], again: Sequence[Checksums | None]) -> set[int]:
    """Return who was wrong about a tile: who did not get what most ranks get now, or else what it gets now itself.

    All ranks, if three or more have no majority, or nobody gets the same twice; none, if there is no telling.
    """
    results = [None if found is None else found.tobytes() for found in again]
    before = {rank: found.tobytes() for rank, found in claims.items()}
    given = [result for result in results if result is not None]
    right = next((r for r in given if 2 * given.count(r) > len(given) > 1), None)
    if right is not None:
        wrong = {rank for rank, result in enumerate(results) if result not in (right, None)}
        return wrong | {rank for rank, result in before.items() if result != right}
    wrong = {rank for rank, result in before.items() if results[rank] not in (result, None)}
    return set(range(len(again))) if len(wrong) == len(before) or len(given) > 2 else wrong


def _judge_data(dispute: Dispute) -> Fault | None:
    if len(set(dispute.data)) == 1:
        return None
    wrong = minority(dispute.data)
    whose = f" (rank {_join(wrong)} differs)" if wrong else ""
    return Fault(
        f"the ranks do not read the same samples for tile {dispute.tile}{whose}: a sample must depend on its index and "
        "on rng alone, and all copies of the data must be equal",
        in_recipe=True,
    )


def _first_difference(a: Checksums, b: Checksums, names: Sequence[str]) -> str:
    first = int(np.flatnonzero(a != b)[0])
    if first < len(names):
        return f"first difference: the gradient of {names[first]}"
    numbers = ("the loss", "the weight of the loss", "the element counts of its terms")
    return f"first difference: {numbers[min(first - len(names), 2)]}"


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
