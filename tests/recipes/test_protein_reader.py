"""Structure files: what the reader makes of them."""

import gzip
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.recipes.protein.chemistry import RESIDUES, SIDE_CHAINS, UNKNOWN
from lockstep.recipes.protein.peptides import peptides
from lockstep.recipes.protein.structures import read, write

pytest.importorskip("gemmi")


def peptide(number: int = 0) -> list[str]:
    """The lines of an embedded peptide as a PDB file."""
    chain = peptides("test", number + 1)[number]
    chain.name = "A"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peptide.pdb"
        write([chain], [torch.zeros(len(chain), 14)], path)
        return path.read_text().splitlines()


def line(name: str, residue: str, number: str, xyz: tuple[float, float, float] = (0, 0, 0), **how: Any) -> str:
    kind = how.get("kind", "ATOM")
    alternative, occupancy, chain = how.get("alternative", " "), how.get("occupancy", 1.0), how.get("chain", "A")
    number, code = (number[:-1], number[-1]) if number[-1].isalpha() else (number, " ")
    x, y, z = xyz
    return (
        f"{kind:<6}    1  {name:<3}{alternative}{residue:>3} {chain}{number:>4}{code}   {x:8.3f}{y:8.3f}{z:8.3f}"
        f"{occupancy:6.2f}  0.00          {how.get('element', name[0]):>2}"
    )


def saved(folder: Path, lines: list[str], name: str = "x.pdb") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def of(lines: list[str], number: str) -> list[str]:
    """The atoms of one residue."""
    return [x for x in lines if x.startswith("ATOM") and x[22:26].strip() == number]


def names(chain: Any) -> list[str]:
    return [RESIDUES[k] if k < UNKNOWN else "UNK" for k in chain.residue.tolist()]


def test_a_written_peptide_reads_back(tmp_path: Path) -> None:
    given = peptides("test", 3)
    write(given, [torch.full((len(c), 14), 12.5) for c in given], tmp_path / "three.pdb")
    chains = read(tmp_path / "three.pdb")
    assert [chain.name for chain in chains] == ["A", "B", "C"]
    for one, other in zip(given, chains, strict=True):
        assert torch.equal(one.residue, other.residue) and torch.equal(one.linked, other.linked)
        assert torch.equal(one.has_chi, other.has_chi) and other.present.all() and one.numbers == other.numbers
        assert (one.backbone - other.backbone).abs().max() <= 0.0006
        assert (torch.remainder(one.chi - other.chi + 180, 360) - 180)[one.has_chi].abs().max() < 0.3


@pytest.mark.parametrize("ending", [".pdb", ".ent", ".cif", ".pdb.gz", ".cif.gz"])
def test_every_kind_of_file_holds_the_same_chain(tmp_path: Path, ending: str) -> None:
    import gemmi

    source = saved(tmp_path, peptide(), "source.pdb")
    path = tmp_path / f"x{ending}"
    structure = gemmi.read_structure(str(source))
    structure.setup_entities()
    text = structure.make_mmcif_document().as_string() if ".cif" in ending else source.read_text()
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    (one,), (other,) = read(source), read(path)
    for name, tensor in one.item().items():
        torch.testing.assert_close(tensor, other.item()[name])


def test_backbone_torsions_are_those_that_gemmi_measures(tmp_path: Path) -> None:
    import gemmi

    from lockstep.recipes.protein.model import backbone_torsions

    path = saved(tmp_path, peptide())
    (chain,) = read(path)
    angles, has = backbone_torsions(chain.backbone[None], chain.present[None], chain.linked[None])
    at = [{atom.name: atom.pos for atom in residue} for residue in gemmi.read_structure(str(path))[0][0]]
    for i in range(1, len(at) - 1):
        before, own, behind = at[i - 1 : i + 2]
        phi = gemmi.calculate_dihedral(before["C"], own["N"], own["CA"], own["C"])
        psi = gemmi.calculate_dihedral(own["N"], own["CA"], own["C"], behind["N"])
        omega = gemmi.calculate_dihedral(before["CA"], before["C"], own["N"], own["CA"])
        difference = angles[0, i] - torch.tensor([phi, psi, omega])
        assert (difference / 2).sin().abs().max() < 1e-4 and has[0, i].all()


def test_only_the_first_model_counts(tmp_path: Path) -> None:
    lines = peptide()[:-1]
    moved = [x[:30] + f"{float(x[30:38]) + 50:8.3f}" + x[38:] if x.startswith("ATOM") else x for x in lines]
    path = saved(tmp_path, ["MODEL        1", *lines, "ENDMDL", "MODEL        2", *moved, "ENDMDL", "END"])
    (chain,) = read(path)
    assert len(chain) == len(peptides("test", 1)[0]) and chain.backbone[:, :, 0].max() < 45


def test_of_alternate_places_the_likelier_counts_as_a_whole(tmp_path: Path) -> None:
    lines = peptide()
    second = of(lines, "2")
    doubled = []
    for x in lines:
        if x in second and x[12:16].strip() not in ("N", "CA", "C", "O"):
            # CB of A is likelier than that of B, but most of the residue is in B.
            is_cb = x[12:16].strip() == "CB"
            doubled.append(
                x[:16] + "A" + x[17:30] + f"{1.0:8.3f}{2.0:8.3f}{3.0:8.3f}{0.55 if is_cb else 0.2:6.2f}" + x[60:]
            )
            doubled.append(x[:16] + "B" + x[17:54] + f"{0.45 if is_cb else 0.8:6.2f}" + x[60:])
        else:
            doubled.append(x)
    (plain,), (chain,) = read(saved(tmp_path, lines)), read(saved(tmp_path, doubled, "y.pdb"))
    assert plain.has_chi[1].any()
    torch.testing.assert_close(plain.chi, chain.chi)
    assert torch.equal(plain.has_chi, chain.has_chi)


def test_of_two_residues_in_one_place_the_likelier_counts(tmp_path: Path) -> None:
    lines = peptide()
    third, name = of(lines, "3"), of(lines, "3")[0][17:20]
    rival = "GLY" if name != "GLY" else "ALA"
    first = [x[:16] + "A" + x[17:54] + "  0.30" + x[60:] for x in third]
    other = [
        x[:16] + "B" + rival + x[20:54] + "  0.70" + x[60:] for x in third if x[12:16].strip() in ("N", "CA", "C", "O")
    ]
    at = lines.index(third[0])
    rest = [x for x in lines[at:] if x not in third]
    (chain,) = read(saved(tmp_path, [*lines[:at], *first, *other, *rest]))
    assert names(chain)[2] == rival and len(chain) == len(peptides("test", 1)[0])


def test_selenomethionine_is_methionine_and_other_modified_residues_are_unknown(tmp_path: Path) -> None:
    chain = next(c for c in peptides("test", 60) if "MET" in names(c)[2:-2])
    at = names(chain).index("MET", 2)
    chain.name = "A"
    write([chain], [torch.zeros(len(chain), 14)], tmp_path / "met.pdb")
    lines = (tmp_path / "met.pdb").read_text().splitlines()
    number = str(at + 1)
    for modified, kind in [("MSE", "MET"), ("SEP", "UNK"), ("ZZZ", "UNK")]:
        changed = [
            "HETATM"
            + x[6:17].replace(" SD ", "SE  " if modified == "MSE" else " SD ")
            + modified
            + x[20:76]
            + ("SE" if " SD " in x and modified == "MSE" else x[76:])
            if x in of(lines, number)
            else x
            for x in lines
        ]
        (read_back,) = read(saved(tmp_path, changed, f"{modified}.pdb"))
        assert names(read_back)[at] == kind and len(read_back) == len(chain)
        assert read_back.has_chi[at].sum() == (3 if kind == "MET" else 0)
        assert read_back.linked[1:].all()
        if kind == "MET":
            assert (torch.remainder(read_back.chi - chain.chi + 180, 360) - 180)[at, :3].abs().max() < 0.3


def test_insertion_codes_keep_residues_apart(tmp_path: Path) -> None:
    lines = [x[:22] + "   3A" + x[27:] if x[22:26].strip() == "4" and x.startswith("ATOM") else x for x in peptide()]
    (chain,) = read(saved(tmp_path, lines))
    assert chain.numbers[1:5] == ["2", "3", "3A", "5"] and chain.linked[1:].all()
    chain.sides = torch.zeros(len(chain), 10, 3)
    write([chain], [torch.zeros(len(chain), 14)], tmp_path / "again.pdb")
    assert read(tmp_path / "again.pdb")[0].numbers == chain.numbers


def test_missing_atoms_are_marked_and_a_residue_without_ca_is_a_break(tmp_path: Path) -> None:
    lines = peptide()
    whole = read(saved(tmp_path, lines))[0]
    at = next(i for i in range(4, len(whole)) if whole.has_chi[i].sum() >= 2)
    gone = [("3", "O"), ("2", "CA"), (str(at + 1), SIDE_CHAINS[names(whole)[at]][1].name)]
    kept = [x for x in lines if (x[22:26].strip(), x[12:16].strip()) not in gone or not x.startswith("ATOM")]
    (chain,) = read(saved(tmp_path, kept, "y.pdb"))
    assert chain.numbers[:3] == ["1", "3", "4"] and len(chain) == len(whole) - 1
    assert chain.present[1].tolist() == [True, True, True, False] and (chain.backbone[1, 3] == 0).all()
    assert chain.linked[:3].tolist() == [False, False, True]
    assert not chain.has_chi[at - 1, 0] and torch.equal(
        chain.residue, torch.cat([whole.residue[:1], whole.residue[2:]])
    )


def test_a_break_is_told_by_distance_not_by_numbers(tmp_path: Path) -> None:
    lines = peptide()
    renumbered = [
        x[:22] + f"{int(x[22:26]) + 100:4d}" + x[26:] if x[:4] == "ATOM" and int(x[22:26]) > 6 else x for x in lines
    ]
    assert read(saved(tmp_path, renumbered))[0].linked[1:].all()
    shifted = [
        x[:30] + f"{float(x[30:38]) + 9:8.3f}" + x[38:] if x[:4] == "ATOM" and int(x[22:26]) > 6 else x for x in lines
    ]
    linked = read(saved(tmp_path, shifted))[0].linked
    assert not linked[6] and linked[[*range(1, 6), *range(7, len(linked))]].all()


def test_dna_ligands_ions_and_water_are_left_out(tmp_path: Path) -> None:
    dna = [line(n, res, str(i), (i * 3.0, k, 0), chain="B") for i, res in enumerate(("DA", "DG", "DC", "DT"), 1)
           for k, n in enumerate(("P", "O5'", "C5'", "C4'", "C3'", "O3'"))]  # fmt: skip
    others = [line("CA", "CA", "201", (40, 0, 0), kind="HETATM", element="CA")]
    others += [line("C1", "GOL", "202", (42, 0, 0), kind="HETATM"), line("O", "HOH", "301", (44, 0, 0), kind="HETATM")]
    others += [line(n, "GLU", "203", (50, k, 0), kind="HETATM") for k, n in enumerate(("N", "CA", "C", "O"))]
    lines = peptide()
    (chain,) = read(saved(tmp_path, [*lines[:-1], *dna, "TER", *others, "END"]))
    assert chain.name == "A" and len(chain) == len(peptides("test", 1)[0])
    with pytest.raises(ValueError, match="no protein chain"):
        read(saved(tmp_path, [*dna, "END"], "dna.pdb"))
