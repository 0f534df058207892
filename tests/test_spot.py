"""Spot checks: who repeats what, checksums that add up, and who is to blame."""

import numpy as np
import pytest
import torch

from lockstep.batching import Batching
from lockstep.watch.fingerprints import add_checksums
from lockstep.watch.repair import find_sources
from lockstep.watch.spot import Schedule, settle


@pytest.mark.parametrize(("world", "tiles"), [(2, 2), (2, 7), (3, 4), (4, 7), (5, 5)])
def test_every_rank_is_checked_each_time_and_by_every_other_in_turn(world: int, tiles: int) -> None:
    batching = Batching(1000, 4, 1, world, 4 * tiles, 10).in_tiles(tiles)
    schedule, pairs, seen = Schedule(5, batching, seed=3), set(), set()
    for step in range(0, 5 * 60 * (world - 1), 5):
        found = [schedule.tile(step, rank) for rank in range(world)]
        owners = [schedule.owner(tile) for tile in found]
        assert sorted(owners) == list(range(world)) and all(a != b for a, b in enumerate(owners))
        pairs, seen = pairs | set(enumerate(owners)), seen | set(found)
        if step == 5 * (world - 2):
            assert len(pairs) == world * (world - 1)
    assert seen == set(range(tiles))
    assert schedule.repeats(4, 0) == [] and len(schedule.repeats(5, 0)) == 1


def checksum(tensor: torch.Tensor) -> int:
    totals = torch.zeros(1, dtype=torch.int64)
    add_checksums([(0, tensor)], totals)
    return int(totals)


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 50_001])
def test_the_checksum_of_a_sum_is_the_sum_of_the_checksums(size: int) -> None:
    torch.manual_seed(0)
    tiles = [torch.randint(-(1 << 28), 1 << 28, (size,), dtype=torch.int32) for _ in range(7)]
    total = sum(map(checksum, tiles)) % (1 << 64)
    assert checksum(sum(tiles[1:], tiles[0])) % (1 << 64) == total


def test_one_bit_two_bits_and_words_that_change_places_change_the_checksum() -> None:
    torch.manual_seed(0)
    words = torch.randint(-(1 << 28), 1 << 28, (40_000,), dtype=torch.int32)
    before = checksum(words)
    for bit in range(32):
        for places in ([7], [7, 20_000], [7, 7 + 16_384]):
            other = words.clone()
            other[places] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert checksum(other) != before
    assert checksum(words.roll(16_384)) != before and checksum(words.flip(0)) != before


def test_floats_count_as_on_their_grid() -> None:
    floats, scales = torch.tensor([[0.5, -1.25], [3.0, 1e-9]]), torch.tensor([1.0, 4.0])
    totals = torch.zeros(2, dtype=torch.int64)
    add_checksums([(1, floats)], totals, scales)
    assert totals.tolist() == [0, checksum(torch.tensor([2, -5, 12, 0], dtype=torch.int32))]


RIGHT, WRONG, OTHER = np.array([1, 2]), np.array([1, 3]), np.array([0, 2])


@pytest.mark.parametrize(
    ("first", "again", "blamed"),
    [
        ({0: WRONG, 1: RIGHT}, [RIGHT, RIGHT], "rank 0 has computed wrongly: tile 5, first in the loss"),
        ({0: RIGHT, 1: WRONG}, [RIGHT, RIGHT], "rank 1 has"),
        ({0: RIGHT, 1: WRONG}, [RIGHT, OTHER], "rank 1 has"),
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG], "rank 0 or 1 has computed wrongly, no third rank shows which"),
        ({0: RIGHT, 1: OTHER}, [WRONG, WRONG], "rank 0, 1 has"),
        ({1: WRONG, 2: RIGHT}, [RIGHT, WRONG, RIGHT], "rank 1 has computed wrongly: tile 5, first"),
        ({1: WRONG, 2: RIGHT}, [RIGHT, RIGHT, RIGHT], "rank 1 has"),
        ({1: WRONG, 2: RIGHT}, [WRONG, WRONG, RIGHT], "rank 2 has"),
        ({1: WRONG, 2: RIGHT}, [None, WRONG, RIGHT], "rank 1 or 2 has"),
        ({1: WRONG, 2: RIGHT}, [RIGHT, OTHER, WRONG], "rank 1 or 2 has"),
    ],
)
def test_who_is_wrong_about_a_tile(first, again, blamed: str) -> None:
    assert settle(5, first, again, ["weight"]).text.startswith(blamed)


def test_the_first_parameter_that_differs_is_named() -> None:
    assert settle(5, {0: RIGHT, 1: OTHER}, [RIGHT, RIGHT], ["weight"]).text.endswith("first in the gradient of weight")


def test_tensors_are_copied_from_the_majority() -> None:
    assert find_sources([{"a": 1, "b": 2}] * 3) == {}
    assert find_sources([{"a": 9, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 7}]) == {"a": 1, "b": 0}
    assert find_sources([{"a": 9}, {"a": 1}]) is None
    assert find_sources([{"a": 1}, {"a": 1}, {}]) is None
