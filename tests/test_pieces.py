"""Pieces of tensors become whole tensors again, or an error; never a tensor with a gap."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.pieces import IS_PIECES, Piece, Pieces, file_name, join, read, write


def files(folder: Path, *ranks: Pieces) -> list[Pieces]:
    for rank, pieces in enumerate(ranks):
        write(folder / file_name(rank, len(ranks)), pieces)
    return [read((folder / file_name(rank, len(ranks))).read_bytes()) for rank in range(len(ranks))]


def test_rows_of_all_ranks_are_joined_in_any_order(tmp_path: Path) -> None:
    whole = torch.arange(20.0).view(5, 4)
    last = {"model/a.b": Piece(whole[4:].clone(), 4)}
    first = {
        "model/a.b": Piece(whole[:4].clone()),
        "ema-0.9/empty": Piece(torch.zeros(0, 3)),
        "optimizer/a.b/step": Piece(torch.tensor(7.0)),
    }
    found = join(files(tmp_path, first, last, {})[::-1])
    assert torch.equal(found["model"]["a.b"], whole)
    assert found["ema-0.9"]["empty"].shape == (0, 3)
    assert found["optimizer"]["a.b/step"].item() == 7.0
    assert all(IS_PIECES.fullmatch(path.name) for path in tmp_path.iterdir())


@pytest.mark.parametrize("start", [0, 1, 3])
def test_pieces_with_a_gap_or_an_overlap_are_refused(tmp_path: Path, start: int) -> None:
    with pytest.raises(ValueError, match=f"model/a: a piece begins at row {start}"):
        join(files(tmp_path, {"model/a": Piece(torch.zeros(2, 2))}, {"model/a": Piece(torch.ones(2, 2), start)}))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "a")
    with pytest.raises(ValueError, match="no DCP_SHARDING_INFO"):
        read((tmp_path / "a").read_bytes())
