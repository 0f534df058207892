"""Chains built from torsions: ideal bond lengths and angles, planar peptide bonds.

    backbone = build_backbone(phi, psi, omega)            # (n, L) degrees each -> (n, L, 4, 3)
    atoms = build_side_chains(residue, backbone, chi)     # (m,), (m, 4, 3), (m, 4) degrees -> (m, 10, 3)

Legend: n chains, L residues, m residues of any chains; backbone atoms are N, CA, C, O.
"""

import math

import torch
from torch import Tensor

from .chemistry import RESIDUES, SIDE_CHAINS
from .geometry import place_atom

N_CA, CA_C, C_N, C_O = 1.458, 1.525, 1.329, 1.231
"""Bond lengths in Å."""
_N_CA_C, _CA_C_N, _C_N_CA, _CA_C_O = (math.radians(x) for x in (111.0, 117.2, 121.7, 120.1))
SIDE_ATOMS = max(len(atoms) for atoms in SIDE_CHAINS.values())


def build_backbone(phi: Tensor, psi: Tensor, omega: Tensor) -> Tensor:
    """(n, L, 4, 3). The first phi and omega have no effect, and the last psi only one on the last O."""
    phi, psi, omega = phi.deg2rad(), psi.deg2rad(), omega.deg2rad()
    origin = torch.zeros(len(phi), 3, dtype=phi.dtype)
    n, ca = origin, origin + torch.tensor([N_CA, 0.0, 0.0], dtype=phi.dtype)
    turned = [-CA_C * math.cos(_N_CA_C), CA_C * math.sin(_N_CA_C), 0.0]
    c = ca + torch.tensor(turned, dtype=phi.dtype)
    residues = []
    for i in range(phi.shape[1]):
        o = place_atom(n, ca, c, C_O, _CA_C_O, psi[:, i] + math.pi)
        residues.append(torch.stack([n, ca, c, o], dim=1))
        if i + 1 < phi.shape[1]:
            following = place_atom(n, ca, c, C_N, _CA_C_N, psi[:, i])
            alpha = place_atom(ca, c, following, N_CA, _C_N_CA, omega[:, i + 1])
            n, ca, c = following, alpha, place_atom(c, following, alpha, CA_C, _N_CA_C, phi[:, i + 1])
    return torch.stack(residues, dim=1)


def build_side_chains(residue: Tensor, backbone: Tensor, chi: Tensor) -> Tensor:
    """(m, 10, 3): the atoms in the order of SIDE_CHAINS; 0 for atoms that a residue does not have."""
    made = torch.zeros(len(residue), SIDE_ATOMS, 3, dtype=backbone.dtype)
    for kind, name in enumerate(RESIDUES):
        rows = (residue == kind).nonzero().squeeze(1)
        if not len(rows):
            continue
        at = dict(zip(("N", "CA", "C"), backbone[rows, :3].unbind(1), strict=True))
        for i, atom in enumerate(SIDE_CHAINS[name]):
            turn = torch.full_like(chi[rows, 0], atom.turn) + (0 if atom.chi is None else chi[rows, atom.chi])
            a, b, c = (at[reference] for reference in atom.after)
            at[atom.name] = place_atom(a, b, c, atom.length, math.radians(atom.angle), turn.deg2rad())
            made[rows, i] = at[atom.name]
    return made
