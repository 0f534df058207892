"""Proteins as chemistry and geometry: the fragment table, torsions, chains built from them, bins on a circle."""

import math

import pytest
import torch

from lockstep.recipes.protein import chemistry
from lockstep.recipes.protein.build import build_backbone, build_side_chains
from lockstep.recipes.protein.chemistry import CHI_ATOMS, END, FRAGMENTS, PAD, RESIDUES, SIDE_CHAINS, TOKENS
from lockstep.recipes.protein.geometry import BINS, bin_centres, frames, from_bins, place_atom, to_bins, torsion, within
from lockstep.recipes.protein.model import backbone_torsions
from lockstep.recipes.protein.peptides import peptides
from lockstep.rng import Rng

HEAVY = {"phenyl": 6, "carboxyl": 3, "amide": 3, "guanidine": 4, "imidazole": 5, "indole": 9}
"""Atoms of a fragment, hydrogens left out; 1 where it is not here."""
TABLE = {
    "ALA": "methyl",
    "VAL": "branch methyl methyl",
    "LEU": "methylene branch methyl methyl",
    "ILE": "branch methyl methylene methyl",
    "MET": "methylene methylene thiol methyl",
    "PHE": "methylene phenyl",
    "TYR": "methylene phenyl hydroxyl",
    "TRP": "methylene indole",
    "SER": "methylene hydroxyl",
    "THR": "branch hydroxyl methyl",
    "ASN": "methylene amide",
    "GLN": "methylene methylene amide",
    "LYS": "methylene methylene methylene methylene amine",
    "ARG": "methylene methylene methylene guanidine",
    "HIS": "methylene imidazole",
    "ASP": "methylene carboxyl",
    "GLU": "methylene methylene carboxyl",
    "CYS": "methylene thiol",
    "GLY": "",
    "PRO": "methylene methylene methylene",
}


def drawn(name: str, *shape: int, keys: int = 50) -> torch.Tensor:
    """Angles in degrees, (keys, *shape)."""
    index = torch.arange(keys)
    return 360 * Rng.of(3, index * 0, index).uniform(name, *shape, dtype=torch.float64) - 180


def test_every_residue_has_its_fragments() -> None:
    assert {name: " ".join(fragments) for name, fragments in FRAGMENTS.items()} == TABLE
    assert len(TOKENS) == 16 and TOKENS[:4] == ("pad", "mask", "begin", "end") and len(set(FRAGMENTS.values())) == 20


def test_the_slots_hold_the_fragments_then_the_end_then_padding() -> None:
    table = chemistry.slot_table()
    for kind, name in enumerate(RESIDUES):
        words = [TOKENS[token] for token in table[kind].tolist()]
        expected = [*TABLE[name].split(), "end", *["pad"] * 5][:5]
        assert words == expected, name
    assert (table[-1] == PAD).all() and (table == END).sum() == 19


@pytest.mark.parametrize("name", RESIDUES)
def test_fragments_and_atoms_of_a_side_chain_agree(name: str) -> None:
    assert sum(HEAVY.get(fragment, 1) for fragment in FRAGMENTS[name]) == len(SIDE_CHAINS[name])
    atoms = {atom.name for atom in SIDE_CHAINS[name]} | {"N", "CA", "C"}
    assert set(CHI_ATOMS[name]) <= atoms


def test_torsions_are_those_that_gemmi_measures() -> None:
    gemmi = pytest.importorskip("gemmi")
    points = drawn("points", 4, 3) / 60
    mine = torsion(*points.unbind(1))
    for four, angle in zip(points.tolist(), mine.tolist(), strict=True):
        assert gemmi.calculate_dihedral(*(gemmi.Position(*p) for p in four)) == pytest.approx(angle, abs=1e-9)


def test_a_right_angle_has_the_sign_that_the_field_gives_it() -> None:
    a, b, c = (torch.tensor(x) for x in ([0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]))
    assert float(torsion(a, b, c, torch.tensor([1.0, 0.0, 1.0])).rad2deg()) == pytest.approx(90)
    assert float(torsion(a, b, c, torch.tensor([1.0, 1.0, 0.0])).rad2deg()) == pytest.approx(0)


def test_a_placed_atom_has_the_length_angle_and_torsion_asked_for() -> None:
    a, b, c = (drawn("before", 3, 3) / 60).unbind(1)
    angle, turn = (drawn("angle").abs() * 0.9 + 9).deg2rad(), drawn("turn").deg2rad()
    d = place_atom(a, b, c, 1.7, angle, turn)
    torch.testing.assert_close((d - c).norm(dim=-1), torch.full((50,), 1.7, dtype=torch.float64))
    cosine = ((b - c) * (d - c)).sum(-1) / (b - c).norm(dim=-1) / 1.7
    torch.testing.assert_close(cosine, angle.cos())
    torch.testing.assert_close(torsion(a, b, c, d), turn)


def test_a_chain_built_from_torsions_has_them() -> None:
    phi, psi = drawn("phi", 9), drawn("psi", 9)
    omega = 180 + drawn("omega", 9) / 20
    backbone = build_backbone(phi, psi, omega)
    present, linked = torch.ones(50, 9, 4, dtype=torch.bool), torch.arange(9).expand(50, -1) > 0
    angles, has = backbone_torsions(backbone, present, linked)
    for k, (given, there) in enumerate([(phi, slice(1, 9)), (psi, slice(0, 8)), (omega, slice(1, 9))]):
        error = (angles[:, there, k] - given[:, there].deg2rad()) / 2
        assert error.sin().abs().max() < 1e-9
        assert has[:, there, k].all() and has[..., k].sum() == 50 * 8
    n, ca, c, o = backbone.unbind(2)
    for x, y, length in [(n, ca, 1.458), (ca, c, 1.525), (c[:, :-1], n[:, 1:], 1.329), (c, o, 1.231)]:
        assert ((x - y).norm(dim=-1) - length).abs().max() < 1e-9
    assert ((ca[:, 1:] - ca[:, :-1]).norm(dim=-1) - 3.8).abs().max() < 0.08  # the well-known distance of trans bonds


def test_side_chains_built_from_torsions_have_them() -> None:
    for kind, name in enumerate(RESIDUES):
        chi = drawn(name, 4)
        backbone = build_backbone(*(drawn(x, 1) for x in "abc"))[:, 0]
        made = build_side_chains(torch.full((50,), kind), backbone, chi)
        at = dict(zip(("N", "CA", "C"), backbone.unbind(1), strict=False))
        at |= dict(zip((atom.name for atom in SIDE_CHAINS[name]), made.unbind(1), strict=False))
        for k in range(len(CHI_ATOMS[name]) - 3):
            measured = torsion(*(at[x] for x in CHI_ATOMS[name][k : k + 4]))
            assert ((measured - chi[:, k].deg2rad()) / 2).sin().abs().max() < 1e-9, (name, k)
        assert (made[:, len(SIDE_CHAINS[name]) :] == 0).all()


CLOSURES = [("PHE", "CE2", "CZ", 1.39), ("TYR", "CE2", "CZ", 1.39), ("HIS", "CE1", "NE2", 1.32)]
CLOSURES += [("TRP", "NE1", "CE2", 1.37), ("TRP", "CZ3", "CH2", 1.4), ("PRO", "CD", "N", 1.47)]


@pytest.mark.parametrize(("name", "one", "other", "length"), CLOSURES)
def test_rings_close(name: str, one: str, other: str, length: float) -> None:
    """The last bond of a ring is no setting: it follows from all the others."""
    chi = torch.tensor([[28.0, -36.4, 0.0, 0.0]], dtype=torch.float64)
    backbone = build_backbone(*(torch.full((1, 1), x, dtype=torch.float64) for x in (-65.0, 140.0, 180.0)))[:, 0]
    made = build_side_chains(torch.tensor([RESIDUES.index(name)]), backbone, chi)[0]
    at = {atom.name: x for atom, x in zip(SIDE_CHAINS[name], made, strict=False)} | {"N": backbone[0, 0]}
    assert float((at[one] - at[other]).norm()) == pytest.approx(length, abs=0.1 if name == "PRO" else 0.04)


def test_amino_acids_are_left_handed() -> None:
    """Seen from the hydrogen, CO, R and N read in the clockwise sense (the CORN rule)."""
    backbone = build_backbone(*(drawn(x, 1) for x in "abc"))[:, 0]
    cb = build_side_chains(torch.zeros(50, dtype=torch.int64), backbone, drawn("chi", 4))[:, 0]
    n, ca, c, _ = backbone.unbind(1)
    assert (torch.linalg.cross(n - ca, c - ca) * (cb - ca)).sum(-1).gt(1).all()


def test_frames_turn_with_the_residue() -> None:
    points = drawn("frame", 3, 3) / 60
    axes = frames(*points.unbind(1))
    torch.testing.assert_close(axes @ axes.mT, torch.eye(3, dtype=torch.float64).expand(50, 3, 3))
    assert (torch.linalg.det(axes) > 0.99).all()
    missing = torch.zeros(1, 3)
    assert (frames(missing, missing, missing) == 0).all()


def test_bins_go_round_the_circle() -> None:
    def bins(degrees: float) -> tuple[int, int, float]:
        below, above, share = to_bins(torch.tensor(degrees, dtype=torch.float64), torch.tensor(False))
        return int(below), int(above), float(share)

    assert bins(179.0) == pytest.approx((BINS - 1, 0, 0.3))
    assert bins(-179.0) == pytest.approx((BINS - 1, 0, 0.7))
    assert bins(-177.5) == (0, 1, 0.0)
    assert bins(540.0) == bins(180.0) == bins(-180.0)


def test_symmetric_torsions_are_the_same_after_half_a_turn() -> None:
    angle, symmetric = drawn("angle"), torch.ones(50, dtype=torch.bool)
    for one, other in zip(to_bins(angle, symmetric), to_bins(angle + 180, symmetric), strict=True):
        torch.testing.assert_close(one, other)
    assert to_bins(angle, symmetric)[0].max() < 36 and to_bins(angle, ~symmetric)[0].max() >= 36
    below, above, _ = to_bins(torch.tensor(-1.0), torch.tensor(True))
    assert (int(below), int(above)) == (35, 0)


@pytest.mark.parametrize("half", [False, True])
def test_an_angle_comes_back_from_its_bins(half: bool) -> None:
    angle, symmetric = drawn("angle"), torch.full((50,), half)
    below, above, share = to_bins(angle, symmetric)
    probability = torch.zeros(50, BINS, dtype=torch.float64)
    probability.scatter_add_(1, below[:, None], (1 - share)[:, None]).scatter_add_(1, above[:, None], share[:, None])
    period = 180 if half else 360
    error = torch.remainder(from_bins(probability, symmetric) - angle + period / 2, period) - period / 2
    assert error.abs().max() < 1e-9
    assert (within(probability, angle, symmetric) > 1 - 1e-9).all()
    assert (within(probability, angle + 90, symmetric) == 0).all()
    even = torch.full((50, BINS), 1 / BINS, dtype=torch.float64)
    near = within(even, bin_centres(angle)[7].expand(50), symmetric)
    assert near.mean() == pytest.approx(9 / BINS * (2 if half else 1))


def test_peptides_are_made_of_their_number_alone_and_use_all_residues() -> None:
    few, many = peptides("val", 5), peptides("val", 40)
    for one, other in zip(few, many, strict=False):
        for name, tensor in one.item().items():
            torch.testing.assert_close(tensor, other.item()[name], rtol=0, atol=1e-4)
    kinds = torch.cat([chain.residue for chain in peptides("train", 300)])
    assert len(kinds.unique()) == 20
    assert not torch.equal(many[0].residue, peptides("train", 1)[0].residue[: len(many[0])])
    assert {len(chain) for chain in many} <= set(range(12, 33)) and len({len(chain) for chain in many}) > 5


def test_a_peptides_residues_follow_from_its_backbone() -> None:
    """A table of region, lean and the neighbour's region, made on one set, names nine of ten residues of another."""
    guess: dict[tuple[int, ...], dict[int, int]] = {}

    def seen(count: int, split: str) -> list[tuple[tuple[int, ...], int]]:
        found = []
        for chain in peptides(split, count):  # type: ignore[arg-type]
            angles, _ = backbone_torsions(chain.backbone[None], chain.present[None], chain.linked[None])
            region = [math.floor((x + 180) / 10) for x in angles[0, :, :2].rad2deg().flatten().tolist()]
            pairs = list(zip(region[::2], region[1::2], strict=True))
            found += [((*pairs[i - 1], *pairs[i]), int(chain.residue[i])) for i in range(2, len(chain) - 1)]
        return found

    for place_, kind in seen(800, "train"):
        guess.setdefault(place_, {}).setdefault(kind, 0)
        guess[place_][kind] += 1
    tested = [(max(guess[p], key=guess[p].__getitem__), kind) for p, kind in seen(100, "test") if p in guess]
    assert sum(a == b for a, b in tested) / len(tested) > 0.75
