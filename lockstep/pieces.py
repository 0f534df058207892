"""Tensors in pieces: the file that each rank of a sharded run writes, and how whole tensors come of all of them.

`shard-00001-of-00008.safetensors` has pieces by "<group>/<name>", and in its header where each begins. It is the layout
of torch.distributed.checkpoint's HuggingFaceStorageWriter, so that HuggingFaceStorageReader reads a checkpoint too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

Tensors = dict[str, dict[str, Tensor]]  # group, which is the stem of a file -> tensor name -> tensor

IS_PIECES = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors")
_HEADER = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


class Piece(NamedTuple):
    """Rows of a tensor, or all of it."""

    tensor: Tensor
    start: int = 0
    """The first of these rows in the whole tensor."""


Pieces = Mapping[str, Piece]  # "<group>/<name>" -> what one rank writes of it


def file_name(rank: int, ranks: int) -> str:
    return f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def write(path: Path, pieces: Pieces) -> None:
    """Write the pieces of one rank, which are in host memory."""
    offsets = {name: {_OFFSETS: [p.start] + [0] * (p.tensor.dim() - 1)} for name, p in pieces.items() if p.tensor.dim()}
    offsets |= {name: {_OFFSETS: []} for name, p in pieces.items() if not p.tensor.dim()}
    header = {_HEADER: json.dumps(offsets)}
    safetensors.torch.save_file({name: piece.tensor for name, piece in pieces.items()}, path, header)


def read(data: bytes) -> dict[str, Piece]:
    """Return the pieces in the contents of one rank's file."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if _HEADER not in header:
        raise ValueError(f"it has no {_HEADER} in its header")
    offsets = json.loads(header[_HEADER])
    starts = {name: next(iter(found[_OFFSETS]), 0) for name, found in offsets.items()}
    return {name: Piece(tensor, starts[name]) for name, tensor in safetensors.torch.load(data).items()}


def join(ranks: Sequence[Pieces]) -> Tensors:
    """Return whole tensors by group and name, from the pieces of all ranks."""
    found: dict[str, list[Piece]] = {}
    for pieces in ranks:
        for name, piece in pieces.items():
            found.setdefault(name, []).append(piece)
    groups: Tensors = {}
    for key in sorted(found):
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = _whole(key, sorted(found[key], key=lambda piece: piece.start))
    return groups


def _whole(name: str, pieces: list[Piece]) -> Tensor:
    end = 0
    for piece in pieces:
        if piece.start != end:
            raise ValueError(f"{name}: a piece begins at row {piece.start}, the one before ends at {end}")
        end += len(piece.tensor) if piece.tensor.dim() else 1
    return pieces[0].tensor if len(pieces) == 1 else torch.cat([piece.tensor for piece in pieces])


def host_copies(tensors: Tensors) -> Tensors:
    """Return contiguous copies in host memory, no two in one storage; waits for the device once."""
    copies = {stem: {name: _host_copy(tensor) for name, tensor in group.items()} for stem, group in tensors.items()}
    for device in {tensor.device for group in tensors.values() for tensor in group.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    with suppress(RuntimeError):  # a machine may limit how much can be pinned; the copy is slower then
        host = host.new_empty(host.shape, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
