"""Values that are not finite: every reader refuses them and names the file and the place."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.recipes.diffusion.frechet import _read
from lockstep.recipes.protein.data import Inputs
from lockstep.recipes.protein.library import Library
from lockstep.recipes.protein.structures import read
from lockstep.weights import read_weights
from recipes.test_protein_reader import peptide, saved


def mmcif(lines: list[str]) -> list[str]:
    """The same atoms as mmCIF."""
    columns = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id "
        "Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id"
    )
    rows = [
        f"ATOM {i} {x[76:78].strip()} {x[12:16].strip()} . {x[17:20]} A 1 {x[22:26].strip()} "
        f"{x[30:38].strip()} {x[38:46].strip()} {x[46:54].strip()} {x[54:60].strip()} 20.0 {x[22:26].strip()} A"
        for i, x in enumerate((x for x in lines if x.startswith("ATOM")), 1)
    ]
    return ["data_x", "loop_", *(f"_atom_site.{column}" for column in columns.split()), *rows]


def spoilt(lines: list[str], column: int, value: str) -> list[str]:
    """mmCIF with another value in one column of the CB of residue 3."""
    made = mmcif(lines)
    at = next(i for i, x in enumerate(made) if x.split()[3:4] == ["CB"] and x.split()[8] == "3")
    words = made[at].split()
    words[column] = value
    return [*made[:at], " ".join(words), *made[at + 1 :]]


@pytest.mark.parametrize(("column", "value"), [(9, "?"), (10, "nan"), (11, "1e39"), (11, "."), (12, "nan")])
def test_mmcif_without_a_finite_position_is_refused_with_its_place(tmp_path: Path, column: int, value: str) -> None:
    pytest.importorskip("gemmi")
    saved(tmp_path, mmcif(peptide()), "good.cif")
    bad = saved(tmp_path, spoilt(peptide(), column, value), "bad.cif")
    with pytest.raises(ValueError, match=r"chain A, residue \w+ 3, atom CB: .* is not a finite number"):
        read(bad)
    library = Library(tmp_path, tmp_path / "cache")
    assert {chain.file for chain in library.chains} == {"good.cif"}
    assert "bad.cif: chain A, residue" in library.list_of_skipped.read_text()
    assert list(Inputs(tmp_path).skipped) == ["bad.cif"]


@pytest.mark.parametrize("value", ["********", "        ", "     nan", "     inf", "  12.3.4"])
def test_pdb_columns_that_are_no_finite_numbers_are_refused(tmp_path: Path, value: str) -> None:
    pytest.importorskip("gemmi")
    lines = peptide()
    lines[7] = lines[7][:38] + value + lines[7][46:]
    with pytest.raises(ValueError, match=r"line 8: the coordinates are three numbers|atom \w+: position .* finite"):
        read(saved(tmp_path, lines))


def test_a_cache_with_values_that_are_not_finite_is_made_again(tmp_path: Path) -> None:
    pytest.importorskip("gemmi")
    saved(tmp_path, peptide())
    library = Library(tmp_path, tmp_path / "cache")
    expected = library.load(0)
    (parsed,) = (tmp_path / "cache").rglob("*.safetensors")
    tensors = safetensors.torch.load(parsed.read_bytes())
    tensors["0.backbone"][2, 1] = float("nan")
    safetensors.torch.save_file(tensors, parsed)
    assert all(torch.equal(value, expected[name]) for name, value in library.load(0).items())


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    weights = {"a": torch.ones(3), "b.weight": torch.ones(2, 2)}
    weights["b.weight"][1, 0] = float("inf")
    file = tmp_path / f"w{ending}"
    (safetensors.torch.save_file if ending == ".safetensors" else torch.save)(weights, file)
    with pytest.raises(ValueError, match=rf"w{ending} holds 1 values that are not finite in b.weight, .* \(1, 0\)"):
        read_weights(file)


def test_statistics_that_are_not_finite_are_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    safetensors.torch.save_file({"sum": torch.tensor([1.0, float("nan")])}, file)
    assert _read(file) == {}


@pytest.mark.timeout(120)
def test_structures_behind_links_are_found_once_and_special_files_skipped(tmp_path: Path) -> None:
    pytest.importorskip("gemmi")
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "deep").mkdir(parents=True)
    saved(folder / "deep", peptide(), os.fsdecode(b"\xe9.pdb"))
    (folder / "deep" / "loop").symlink_to("..")
    (folder / "again").symlink_to("deep")
    os.mkfifo(folder / "fifo.pdb")
    (folder / "gone.pdb").symlink_to("nowhere")
    library = Library(folder, folder / "cache")
    assert [os.fsencode(chain.file) for chain in library.chains] == [b"deep/\xe9.pdb"]
    assert library.skipped == {"fifo.pdb": "is a FIFO, not a file", "gone.pdb": "is a broken link, not a file"}
    assert len(library.load(0)["residue"]) == library.chains[0].length
    assert sorted(Inputs(folder).skipped) == ["fifo.pdb", "gone.pdb"]
