"""Checksums: equal for equal bits, whatever the layout, and not for others."""

import pytest
import torch

from lockstep.watch.drift import checksums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.complex128]


def one(tensor: torch.Tensor) -> int:
    return checksums({"t": tensor})["t"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (16, 16), (1 << 20,)])
def test_one_element_that_changes_is_noticed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert one(tensor) == one(tensor.clone())
    for place in (0, tensor.numel() // 2, tensor.numel() - 1):
        other = tensor.clone()
        other.view(-1)[place] = not other.view(-1)[place]
        assert one(other) != one(tensor)


def test_layout_does_not_count() -> None:
    base = torch.arange(101.0)
    assert one(base[1:9]) == one(base[1:9].clone())  # words that begin in the middle of eight bytes
    square = torch.randn(6, 6)
    assert one(square.t()) == one(square.t().contiguous())


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_signs_that_change_together_are_noticed(dtype: torch.dtype, size: int) -> None:
    tensor = torch.ones(size, dtype=dtype)
    for places in ([1, 3], [0, 2], [0, 1, 2, 3]):
        other = tensor.clone()
        other[places] *= -1
        assert one(other) != one(tensor)


def test_many_together_are_as_each_alone_and_in_order() -> None:
    torch.manual_seed(0)
    shapes = [(4, 2), (3,), (4, 2), (0,), (0, 2), (0,), (), (4, 2), (1 << 14,), (1 << 14,), ()]
    tensors = {f"t{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    tensors["half"] = torch.randn(4, 2).half()
    sums = checksums(tensors)
    assert list(sums) == list(tensors)
    assert sums == {name: one(tensor) for name, tensor in tensors.items()}
    assert sums["t3"] == 0 and checksums({}) == {}
