"""Spot checks: who repeats what, checksums that add up, and who is to blame."""

import numpy as np
import pytest
import torch

from lockstep.batching import Batching
from lockstep.distributed import World
from lockstep.watch.fingerprints import add_checksums
from lockstep.watch.repair import copy_tensors, find_sources
from lockstep.watch.spot import Schedule
from lockstep.watch.verdict import Dispute, settle, wrong_ranks


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
    ("claims", "again", "wrong"),
    [
        ({0: WRONG, 1: RIGHT}, [RIGHT, RIGHT], {0}),
        ({0: RIGHT, 1: WRONG}, [RIGHT, RIGHT], {1}),
        ({0: RIGHT, 1: WRONG}, [RIGHT, OTHER], {1}),
        ({0: RIGHT, 1: WRONG}, [RIGHT, WRONG], set()),
        ({0: RIGHT, 1: WRONG}, [RIGHT, None], set()),
        ({0: RIGHT, 1: WRONG}, [None, OTHER], {1}),
        ({0: RIGHT, 1: OTHER}, [WRONG, WRONG], {0, 1}),
        ({0: RIGHT, 1: OTHER}, [OTHER, RIGHT], {0, 1}),
        ({1: WRONG, 2: RIGHT}, [RIGHT, WRONG, RIGHT], {1}),
        ({1: WRONG, 2: RIGHT}, [RIGHT, RIGHT, RIGHT], {1}),
        ({1: WRONG, 2: RIGHT}, [WRONG, WRONG, RIGHT], {2}),
        ({1: WRONG, 2: RIGHT}, [None, WRONG, RIGHT], set()),
        ({1: WRONG, 2: RIGHT}, [OTHER, WRONG, RIGHT], {0, 1, 2}),
        ({1: WRONG, 2: RIGHT}, [RIGHT, OTHER, WRONG], {0, 1, 2}),
    ],
)
def test_who_is_wrong_about_a_tile(claims, again, wrong: set[int]) -> None:
    assert wrong_ranks(claims, again) == wrong


def settled(*disputes: tuple) -> str:
    """`disputes`: tile, claims, what ranks get again."""
    data = ["same"] * len(disputes[0][2])
    return settle([Dispute(*dispute, data) for dispute in disputes], ["weight"]).text


def test_the_first_parameter_that_differs_is_named() -> None:
    expected = "rank 1 has computed tile 5 wrongly (first difference: the gradient of weight)"
    assert settled((5, {0: RIGHT, 1: OTHER}, [RIGHT, RIGHT])) == expected
    assert settled((5, {0: RIGHT, 1: WRONG}, [RIGHT, RIGHT])).endswith("(first difference: the loss)")


def test_a_second_tile_may_show_which_rank_is_wrong() -> None:
    unclear = (3, {0: RIGHT, 1: WRONG}, [RIGHT, WRONG])
    assert settled(unclear).startswith("rank 0 and rank 1 get different bits for tile 3, and each the same again")
    assert settled(unclear, (5, {0: RIGHT, 1: WRONG}, [RIGHT, OTHER])).startswith("rank 1 has computed tile 5 wrongly")


def test_where_every_rank_would_be_wrong_it_is_the_recipe() -> None:
    owners = [(tile, {tile: WRONG, 1 - tile: RIGHT}, [RIGHT, RIGHT]) for tile in (0, 1)]
    assert settled(*owners).startswith("a tile does not have the same bits on all ranks, and no single rank is wrong")


def test_samples_that_differ_are_no_fault_of_a_device() -> None:
    for data, whose in ((["a", "a", "b"], " (rank 2 differs)"), (["a", "b"], "")):
        fault = settle([Dispute(5, {0: RIGHT, 1: WRONG}, [RIGHT, WRONG], data)], ["weight"])
        assert fault.text.startswith(f"the ranks do not read the same samples for tile 5{whose}:") and fault.in_recipe


def test_tensors_of_the_host_are_not_sent_over_the_devices_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no such broadcast; the counters of AdamW's steps are on the host."""
    groups = []
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, source, group: groups.append(group))
    world = World(cpu_group="gloo")  # type: ignore[arg-type]
    copy_tensors({"step": torch.zeros(1), "weight": torch.zeros(1, device="meta")}, {"step": 1, "weight": 1}, world)
    assert groups == ["gloo", None]


def test_tensors_are_copied_from_the_majority() -> None:
    assert find_sources([{"a": 1, "b": 2}] * 3) == {}
    assert find_sources([{"a": 9, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 7}]) == {"a": 1, "b": 0}
    assert find_sources([{"a": 9}, {"a": 1}]) is None
    assert find_sources([{"a": 1}, {"a": 1}, {}]) is None
