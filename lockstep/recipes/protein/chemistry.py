"""What side chains are made of: fragments, torsions, and the ideal geometry to build them from.

A side chain is a short sequence of rigid fragments, and a residue is six tokens: `begin`, which stands for the residue
itself, and five slots. The slots hold the fragments, then `end` (unless there are five fragments), then `pad`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

RESIDUES = (
    *("ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE"),
    *("LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL"),
)
UNKNOWN = len(RESIDUES)
"""The number of a residue that is none of the twenty."""
BACKBONE = ("N", "CA", "C", "O")

PAD, MASK, BEGIN, END = range(4)
TOKENS = (
    *("pad", "mask", "begin", "end"),
    *("methyl", "methylene", "hydroxyl", "phenyl", "amine", "carboxyl"),
    *("amide", "guanidine", "imidazole", "indole", "thiol", "branch"),
)
SPECIAL = 4
"""Tokens from here on are fragments."""
SLOTS = 5
"""The most fragments of a side chain (lysine)."""
PER_RESIDUE = 1 + SLOTS

FRAGMENTS: dict[str, tuple[str, ...]] = {
    "ALA": ("methyl",),
    "ARG": ("methylene", "methylene", "methylene", "guanidine"),
    "ASN": ("methylene", "amide"),
    "ASP": ("methylene", "carboxyl"),
    "CYS": ("methylene", "thiol"),
    "GLN": ("methylene", "methylene", "amide"),
    "GLU": ("methylene", "methylene", "carboxyl"),
    "GLY": (),
    "HIS": ("methylene", "imidazole"),
    "ILE": ("branch", "methyl", "methylene", "methyl"),
    "LEU": ("methylene", "branch", "methyl", "methyl"),
    "LYS": ("methylene", "methylene", "methylene", "methylene", "amine"),
    "MET": ("methylene", "methylene", "thiol", "methyl"),
    "PHE": ("methylene", "phenyl"),
    "PRO": ("methylene", "methylene", "methylene"),
    "SER": ("methylene", "hydroxyl"),
    "THR": ("branch", "hydroxyl", "methyl"),
    "TRP": ("methylene", "indole"),
    "TYR": ("methylene", "phenyl", "hydroxyl"),
    "VAL": ("branch", "methyl", "methyl"),
}

TORSIONS = 4
CHI_ATOMS: dict[str, tuple[str, ...]] = {
    "ALA": (),
    "ARG": ("N", "CA", "CB", "CG", "CD", "NE", "CZ"),
    "ASN": ("N", "CA", "CB", "CG", "OD1"),
    "ASP": ("N", "CA", "CB", "CG", "OD1"),
    "CYS": ("N", "CA", "CB", "SG"),
    "GLN": ("N", "CA", "CB", "CG", "CD", "OE1"),
    "GLU": ("N", "CA", "CB", "CG", "CD", "OE1"),
    "GLY": (),
    "HIS": ("N", "CA", "CB", "CG", "ND1"),
    "ILE": ("N", "CA", "CB", "CG1", "CD1"),
    "LEU": ("N", "CA", "CB", "CG", "CD1"),
    "LYS": ("N", "CA", "CB", "CG", "CD", "CE", "NZ"),
    "MET": ("N", "CA", "CB", "CG", "SD", "CE"),
    "PHE": ("N", "CA", "CB", "CG", "CD1"),
    "PRO": ("N", "CA", "CB", "CG", "CD"),
    "SER": ("N", "CA", "CB", "OG"),
    "THR": ("N", "CA", "CB", "OG1"),
    "TRP": ("N", "CA", "CB", "CG", "CD1"),
    "TYR": ("N", "CA", "CB", "CG", "CD1"),
    "VAL": ("N", "CA", "CB", "CG1"),
}
"""A path along the side chain: chi k is the torsion of the four atoms from the k-th on."""
SYMMETRIC = {("ASP", 1), ("GLU", 2), ("PHE", 1), ("TYR", 1)}
"""Residue and number (from 0) of torsions that are symmetric under half a turn: both ends have the same atoms."""


class Atom(NamedTuple):
    """How to place an atom: `length` from the last of three placed atoms, with a bond angle and a torsion (degrees).

    The torsion is `turn`, or chi number `chi` (from 0) plus `turn`.
    """

    name: str
    after: tuple[str, str, str]
    length: float
    angle: float
    turn: float = 0.0
    chi: int | None = None


def _chi(path: str, length: float, angle: float, chi: int, turn: float = 0.0) -> Atom:
    """An atom that chi number `chi` turns; `path` is the four atoms of the torsion, the new one last."""
    a, b, c, name = path.split()
    return Atom(name, (a, b, c), length, angle, turn, chi)


def _fixed(path: str, length: float, angle: float, turn: float) -> Atom:
    a, b, c, name = path.split()
    return Atom(name, (a, b, c), length, angle, turn)


def _six_ring(side: float, angle: float, last: float) -> list[Atom]:
    """The atoms of a phenyl ring after CB and CG."""
    return [
        _chi("CA CB CG CD1", side, angle, 1),
        _chi("CA CB CG CD2", side, angle, 1, 180.0),
        _fixed("CB CG CD1 CE1", side, angle, 180.0),
        _fixed("CB CG CD2 CE2", side, angle, 180.0),
        _fixed("CG CD1 CE1 CZ", side, last, 0.0),
    ]


_GAMMA = "N CA CB CG"
_CB = _fixed("N C CA CB", 1.53, 110.1, 122.8)
_CB_OF_PRO = _fixed("N C CA CB", 1.531, 110.9, 115.3)
"""Its ring pulls CB towards N."""
_BEYOND_CB: dict[str, list[Atom]] = {
    "ALA": [],
    "ARG": [
        _chi(_GAMMA, 1.52, 113.9, 0),
        _chi("CA CB CG CD", 1.522, 111.7, 1),
        _chi("CB CG CD NE", 1.46, 111.7, 2),
        _chi("CG CD NE CZ", 1.33, 124.7, 3),
        _fixed("CD NE CZ NH1", 1.326, 120.3, 0.0),
        _fixed("CD NE CZ NH2", 1.326, 119.2, 180.0),
    ],
    "ASN": [
        _chi(_GAMMA, 1.516, 112.7, 0),
        _chi("CA CB CG OD1", 1.234, 120.9, 1),
        _chi("CA CB CG ND2", 1.328, 116.5, 1, 180.0),
    ],
    "ASP": [
        _chi(_GAMMA, 1.52, 113.0, 0),
        _chi("CA CB CG OD1", 1.25, 119.2, 1),
        _chi("CA CB CG OD2", 1.25, 118.3, 1, 180.0),
    ],
    "CYS": [_chi("N CA CB SG", 1.806, 113.8, 0)],
    "GLN": [
        _chi(_GAMMA, 1.522, 113.8, 0),
        _chi("CA CB CG CD", 1.517, 112.8, 1),
        _chi("CB CG CD OE1", 1.235, 120.9, 2),
        _chi("CB CG CD NE2", 1.329, 116.5, 2, 180.0),
    ],
    "GLU": [
        _chi(_GAMMA, 1.522, 113.8, 0),
        _chi("CA CB CG CD", 1.52, 113.2, 1),
        _chi("CB CG CD OE1", 1.252, 119.0, 2),
        _chi("CB CG CD OE2", 1.251, 118.1, 2, 180.0),
    ],
    "GLY": [],
    "HIS": [
        _chi(_GAMMA, 1.496, 113.6, 0),
        _chi("CA CB CG ND1", 1.378, 122.7, 1),
        _chi("CA CB CG CD2", 1.354, 131.0, 1, 180.0),
        _fixed("CB CG ND1 CE1", 1.32, 109.0, 180.0),
        _fixed("CB CG CD2 NE2", 1.374, 107.2, 180.0),
    ],
    "ILE": [
        _chi("N CA CB CG1", 1.533, 110.4, 0),
        _chi("N CA CB CG2", 1.53, 110.7, 0, -123.0),
        _chi("CA CB CG1 CD1", 1.522, 114.0, 1),
    ],
    "LEU": [
        _chi(_GAMMA, 1.529, 116.3, 0),
        _chi("CA CB CG CD1", 1.525, 110.3, 1),
        _chi("CA CB CG CD2", 1.524, 110.4, 1, -122.8),
    ],
    "LYS": [
        _chi(_GAMMA, 1.522, 113.8, 0),
        _chi("CA CB CG CD", 1.523, 111.5, 1),
        _chi("CB CG CD CE", 1.523, 111.6, 2),
        _chi("CG CD CE NZ", 1.494, 111.8, 3),
    ],
    "MET": [
        _chi(_GAMMA, 1.52, 113.8, 0),
        _chi("CA CB CG SD", 1.807, 112.5, 1),
        _chi("CB CG SD CE", 1.789, 100.5, 2),
    ],
    "PHE": [_chi(_GAMMA, 1.505, 113.8, 0), *_six_ring(1.39, 120.7, 120.0)],
    "PRO": [_chi(_GAMMA, 1.495, 104.8, 0), _chi("CA CB CG CD", 1.502, 106.1, 1)],
    "SER": [_chi("N CA CB OG", 1.417, 110.8, 0)],
    "THR": [_chi("N CA CB OG1", 1.433, 109.2, 0), _chi("N CA CB CG2", 1.525, 111.1, 0, -120.3)],
    "TRP": [
        _chi(_GAMMA, 1.499, 114.0, 0),
        _chi("CA CB CG CD1", 1.367, 127.1, 1),
        _chi("CA CB CG CD2", 1.431, 126.6, 1, 180.0),
        _fixed("CB CG CD1 NE1", 1.374, 110.2, 180.0),
        _fixed("CB CG CD2 CE2", 1.409, 107.2, 180.0),
        _fixed("CB CG CD2 CE3", 1.398, 133.9, 0.0),
        _fixed("CG CD2 CE2 CZ2", 1.394, 122.4, 180.0),
        _fixed("CG CD2 CE3 CZ3", 1.382, 118.6, 180.0),
        _fixed("CD2 CE2 CZ2 CH2", 1.368, 117.5, 0.0),
    ],
    "TYR": [
        _chi(_GAMMA, 1.51, 113.7, 0),
        *_six_ring(1.39, 120.9, 119.6),
        _fixed("CD1 CE1 CZ OH", 1.376, 119.8, 180.0),
    ],
    "VAL": [_chi("N CA CB CG1", 1.527, 110.7, 0), _chi("N CA CB CG2", 1.527, 110.4, 0, 122.8)],
}
SIDE_CHAINS: dict[str, list[Atom]] = {
    name: [] if name == "GLY" else [_CB_OF_PRO if name == "PRO" else _CB, *_BEYOND_CB[name]] for name in RESIDUES
}  # in the order in which they can be placed


def slot_table() -> Tensor:
    """(21, 5) int64: the tokens in the slots of each kind of residue; all `pad` for the unknown kind."""
    rows = []
    for name in RESIDUES:
        tokens = [TOKENS.index(fragment) for fragment in FRAGMENTS[name]] + [END]
        rows.append((tokens + [PAD] * SLOTS)[:SLOTS])
    return torch.tensor([*rows, [PAD] * SLOTS])


def torsion_table() -> Tensor:
    """(21, 4) bool: which torsions each kind of residue has."""
    rows = [[k < len(CHI_ATOMS[name]) - 3 for k in range(TORSIONS)] for name in RESIDUES]
    return torch.tensor([*rows, [False] * TORSIONS])


def symmetry_table() -> Tensor:
    """(21, 4) bool: which of them are symmetric under half a turn."""
    rows = [[(name, k) in SYMMETRIC for k in range(TORSIONS)] for name in RESIDUES]
    return torch.tensor([*rows, [False] * TORSIONS])
