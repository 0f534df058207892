"""The passes over all gradients that exact sums and their checksums need, each one kernel for all tensors together."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_CHUNK = 4096
Numbered = list[tuple[int, Tensor]]


@triton.jit
def _add_kernel(table, chunks, scales, largest, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """table: rows of 5 numbers (gradient, before, total, elements, number); chunks: (row, first element)."""
    row = tl.load(chunks + 2 * tl.program_id(0)) * 5
    at = tl.load(chunks + 2 * tl.program_id(0) + 1) + tl.arange(0, chunk)
    gradient = tl.load(table + row).to(tl.pointer_type(tl.float32))
    before = tl.load(table + row + 1)
    total = tl.load(table + row + 2).to(tl.pointer_type(tl.int32))
    inside = at < tl.load(table + row + 3)
    number = tl.load(table + row + 4)
    x = tl.load(gradient + at, inside, other=0.0)
    rounded = libdevice.rint(x * tl.load(scales + number)).to(tl.int32)
    if before != 0:
        rounded += tl.load(before.to(tl.pointer_type(tl.int32)) + at, inside, other=0)
    tl.store(total + at, rounded, inside)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest + number, tl.max(size, 0))


@triton.jit
def _float_kernel(table, chunks, units, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """table: rows of 3 numbers (gradient, elements, number)."""
    row = tl.load(chunks + 2 * tl.program_id(0)) * 3
    at = tl.load(chunks + 2 * tl.program_id(0) + 1) + tl.arange(0, chunk)
    address = tl.load(table + row)
    inside = at < tl.load(table + row + 1)
    unit = tl.load(units + tl.load(table + row + 2))
    integers = tl.load(address.to(tl.pointer_type(tl.int32)) + at, inside, other=0)
    tl.store(address.to(tl.pointer_type(tl.float32)) + at, integers.to(tl.float32) * unit, inside)


def add_tile(
    gradients: Numbered, before: list[Tensor | None], totals: list[Tensor], scales: Tensor, largest: Tensor
) -> None:
    """Write before + round(gradient × scale) into each total, and raise `largest` to the largest gradient."""
    if gradients:
        rows = tuple(
            (g.data_ptr(), 0 if old is None else old.data_ptr(), total.data_ptr(), g.numel(), i)
            for (i, g), old, total in zip(gradients, before, totals, strict=True)
        )
        table, chunks, count = _tables(rows, scales.device)
        _add_kernel[(count,)](table, chunks, scales, largest, chunk=_CHUNK)


def to_floats(gradients: Numbered, units: Tensor) -> None:
    """Multiply the integers in the gradients' memory by the units of the grid."""
    if gradients:
        rows = tuple((g.data_ptr(), g.numel(), i) for i, g in gradients)
        table, chunks, count = _tables(rows, units.device)
        _float_kernel[(count,)](table, chunks, units, chunk=_CHUNK)


@triton.jit
def _checksum_kernel(  # type: ignore[no-untyped-def]
    table, chunks, scales, totals, positions, blocks, floats: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr
):
    """table: rows of 3 numbers (tensor, elements, number). A chunk lies within one block."""
    row = tl.load(chunks + 2 * tl.program_id(0)) * 3
    start = tl.load(chunks + 2 * tl.program_id(0) + 1)
    lane = tl.arange(0, chunk)
    address = tl.load(table + row)
    inside = start + lane < tl.load(table + row + 1)
    number = tl.load(table + row + 2)
    if floats:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + start + lane, inside, other=0.0)
        integers = libdevice.rint(x * tl.load(scales + number)).to(tl.int32)
    else:
        integers = tl.load(address.to(tl.pointer_type(tl.int32)) + start + lane, inside, other=0)
    products = integers.to(tl.int64) * tl.load(positions + start % block + lane)
    tl.atomic_add(totals + number, tl.sum(products, 0) * tl.load(blocks + start // block))


def add_checksums(tensors: Numbered, totals: Tensor, scales: Tensor | None, positions: Tensor, blocks: Tensor) -> None:
    """Add to each total the sum of the tensor's integers, or of its floats times scale, each times two weights.

    The weight of an element's position in its block, of `len(positions)` elements, and the weight of the block.
    """
    if tensors:
        table, chunks, count = _tables(tuple((t.data_ptr(), t.numel(), i) for i, t in tensors), totals.device)
        _checksum_kernel[(count,)](
            table, chunks, totals if scales is None else scales, totals, positions, blocks,
            floats=scales is not None, chunk=_CHUNK, block=len(positions),
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _tables(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the rows, and which chunk of which row each program takes; addresses mostly stay from step to step."""
    chunks = _chunks(tuple(row[-2] for row in rows), device)
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True), chunks, len(chunks)


@lru_cache(maxsize=4096)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    found = [(row, start) for row, size in enumerate(sizes) for start in range(0, size, _CHUNK)]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2).pin_memory().to(device, non_blocking=True)
