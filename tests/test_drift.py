"""Checksums: equal for equal bits, whatever the layout, and not for others."""

import pytest
import torch

from lockstep.watch.agreement import minority
from lockstep.watch.drift import checksums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.complex128]


def one(tensor: torch.Tensor, positions: bool = True) -> int:
    return checksums({"t": tensor}, positions)["t"]


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (16, 16), (1 << 20,)])
def test_one_element_that_changes_is_noticed(dtype: torch.dtype, shape: tuple[int, ...], positions: bool) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert one(tensor, positions) == one(tensor.clone(), positions)
    for position in (0, tensor.numel() // 2, tensor.numel() - 1):
        other = tensor.clone()
        other.view(-1)[position] = not other.view(-1)[position]
        assert one(other, positions) != one(tensor, positions)


def test_layout_does_not_count() -> None:
    base = torch.arange(101.0)
    assert one(base[1:9]) == one(base[1:9].clone())  # words that begin in the middle of eight bytes
    square = torch.randn(6, 6)
    assert one(square.t()) == one(square.t().contiguous())


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_signs_that_change_together_are_noticed(dtype: torch.dtype, size: int, positions: bool) -> None:
    tensor = torch.ones(size, dtype=dtype)
    for elements in ([1, 3], [0, 2], [0, 1, 2, 3]):
        other = tensor.clone()
        other[elements] *= -1
        assert one(other, positions) != one(tensor, positions)


def test_many_together_are_as_each_alone_and_in_order() -> None:
    torch.manual_seed(0)
    shapes = [(4, 2), (3,), (4, 2), (0,), (0, 2), (0,), (), (4, 2), (1 << 14,), (1 << 14,), ()]
    tensors = {f"t{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    tensors["half"] = torch.randn(4, 2).half()
    sums = checksums(tensors)
    assert list(sums) == list(tensors)
    assert sums == {name: one(tensor) for name, tensor in tensors.items()}
    assert checksums({}) == {}


@pytest.mark.parametrize("size", [6, 100, 20_000, 70_001])
def test_words_that_change_elements_are_noticed(size: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(size // 2, 2)
    changed = {
        "permuted": rows[torch.randperm(len(rows))],
        "reversed rows": rows.flip(0),
        "rolled columns": rows.roll(1, 1),
        "two swapped": torch.cat([rows[1:2], rows[:1], rows[2:]]),
        "halves swapped": rows.roll(len(rows) // 2, 0),
    }
    for what, other in changed.items():
        assert one(other) != one(rows), what
    # Swaps that cancel in any sum weighted by the position alone.
    ramp = torch.tensor([1.0, 2.0, 3.0, 2.0, 1.0, 3.0])
    assert one(ramp[[1, 0, 2, 4, 3, 5]]) != one(ramp)


def test_the_same_bit_flipped_in_two_words_is_noticed() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(2_000, generator=generator).view(torch.int32)
    before = one(words)
    for _ in range(5_000):
        i, j = torch.randperm(len(words), generator=generator)[:2].tolist()
        bit = int(torch.randint(0, 32, (), generator=generator))
        flip = -(1 << 31) if bit == 31 else 1 << bit
        words[[i, j]] ^= flip
        assert one(words) != before, (i, j, bit)
        words[[i, j]] ^= flip


def test_a_majority_names_the_ranks_that_differ() -> None:
    assert minority([5, 5, 7]) == [2] and minority([7, 5, 5, 5, 8]) == [0, 4]
    assert minority([5, 7]) == [] and minority([5, 5, 7, 7]) == []
