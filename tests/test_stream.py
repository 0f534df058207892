"""Every epoch a permutation, every world the same batches."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.stream import Permutation, Stream


@pytest.mark.parametrize("sizes", [range(1, 600), range(600, 5001, 37), [(1 << 20) - 1, 1 << 20, (1 << 20) + 1]])
def test_every_size_is_permuted(sizes) -> None:
    for size in sizes:
        order = Permutation(size, key=size)(np.arange(size))
        assert np.array_equal(np.bincount(order, minlength=size), np.ones(size)), size


@pytest.mark.parametrize("size", [(1 << 40) - 1, 1 << 40, (1 << 40) + 1, (1 << 62)])
def test_huge_sizes_stay_inside_and_do_not_collide(size: int) -> None:
    rng = np.random.default_rng(0)
    positions = np.unique(np.concatenate([rng.integers(0, size, 20000), np.arange(1000), size - 1 - np.arange(1000)]))
    order = Permutation(size, key=3)(positions)
    assert order.min() >= 0 and order.max() < size and len(np.unique(order)) == len(positions)


ORDERS = {10: [4, 1, 8, 6, 7, 9, 0, 5, 2, 3], 1000: [168, 433, 549, 105, 340, 524, 170, 369, 599, 999]}


def test_orders_stay_what_they_were() -> None:
    """Of other versions too: a run that is resumed must not be given another order."""
    for size, expected in ORDERS.items():
        assert Permutation(size, 7)(np.arange(10)).tolist() == expected


def test_small_sets_reach_all_orders_evenly() -> None:
    counts = Counter(tuple(Permutation(4, key)(np.arange(4)).tolist()) for key in range(2400))
    assert len(counts) == 24 and min(counts.values()) > 60 and max(counts.values()) < 150


def test_first_positions_are_spread_evenly() -> None:
    first = np.array([Permutation(50, key)(np.arange(2)) for key in range(2500)])
    for column in first.T:
        counts = np.bincount(column, minlength=50)
        assert ((counts - 50) ** 2 / 50).sum() < 95  # 49 degrees of freedom
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.06


def test_orders_differ_between_epochs_and_seeds() -> None:
    one = Stream(1000, 10, seed=0)
    epochs = [one.positions(1000 * e, 1000 * (e + 1)).index for e in range(3)]
    other = Stream(1000, 10, seed=1).positions(0, 1000).index
    for a, b in [(epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other)]:
        assert (a == b).mean() < 0.01


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 400),
    batch=st.integers(1, 64),
    world=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    steps=st.integers(1, 12),
    seed=st.integers(0, 1 << 40),
)
def test_any_world_cuts_the_same_stream_without_loss_or_repeat(size, batch, world, accumulation, steps, seed) -> None:
    stream = Stream(size, batch, seed)
    ranks = [Stream(size, batch, seed) for _ in range(world)]
    together = []
    for step in range(steps):
        alone = stream.batch(step)
        parts = [ranks[r].micro_batches(step, r, world, accumulation) for r in range(world)]
        index = np.concatenate([piece.index for part in parts for piece in part])
        epoch = np.concatenate([piece.epoch for part in parts for piece in part])
        assert np.array_equal(index, alone.index) and np.array_equal(epoch, alone.epoch)
        lengths = [sum(len(piece.index) for piece in part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        if batch >= world:
            assert all(len(part[-1].index) for part in parts)  # the piece that synchronises is never empty
        together.append(alone)
    index = np.concatenate([part.index for part in together])
    epoch = np.concatenate([part.epoch for part in together])
    for e in range(steps * batch // size):
        assert np.array_equal(np.sort(index[epoch == e]), np.arange(size))


def test_any_step_is_known_without_the_steps_before() -> None:
    walked = Stream(97, 10, seed=4)
    seen = [walked.batch(step).index for step in range(40)]
    for step in (39, 0, 17, 38):
        assert np.array_equal(Stream(97, 10, seed=4).batch(step).index, seen[step])
