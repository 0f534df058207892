"""The embedded data set: peptides built from ideal geometry, so that the recipe runs before anything is downloaded.

Peptide i follows from (split, i) alone. It is a sequence of segments of helix, strand, polyproline and left-handed
turn; within a region phi and psi deviate to one side or the other of their ideal. The kind of a residue follows from
its region, the signs of these deviations and whether the previous residue is in the same region; its side-chain
torsions follow from the two regions and the deviations. One residue in twenty is of a random kind instead: no model
can get all of them right.

Legend: n peptides, L residues.
"""

import torch
from torch import Tensor

from ...recipe import Split
from ...rng import Rng
from .build import build_backbone, build_side_chains
from .chain import Chain
from .chemistry import BACKBONE, RESIDUES, TORSIONS, torsion_table

SIZES: dict[Split, int] = {"train": 2_000, "val": 200, "test": 200}
_SEEDS: dict[Split, int] = {"train": 1, "val": 2, "test": 3}
SHORTEST, LONGEST = 12, 32

_PHI = torch.tensor([-63.0, -120.0, -70.0, 57.0], dtype=torch.float64)
_PSI = torch.tensor([-43.0, 130.0, 150.0, 43.0], dtype=torch.float64)
"""Helix, strand, polyproline, left-handed."""
_LEAN, _SPREAD = 10.0, 4.0
_STAY = (0.85, 0.8, 0.6, 0.35)
"""Probability that the next residue is in the same region."""
_NOISE = 0.05

_KINDS = torch.tensor(
    [
        [RESIDUES.index(name) for name in row.split()]
        for row in (
            # phi and psi below their ideal; psi above; phi above; both above: after a residue of the same region, and
            # then after one of another.
            "LEU ALA GLU LYS  MET GLN ARG HIS",
            "VAL ILE TYR PHE  TRP THR CYS VAL",
            "PRO SER ASP THR  PRO LYS SER GLU",
            "GLY ASN GLY ASP  GLY ASN ASN GLY",
        )
    ]
)
_ROTAMERS = torch.tensor([-65.0, 180.0, 62.0], dtype=torch.float64)
_PROLINE, _PLANAR = RESIDUES.index("PRO"), [RESIDUES.index(name) for name in ("PHE", "TYR", "HIS", "TRP", "ASN", "ASP")]


def peptides(split: Split, count: int | None = None) -> list[Chain]:
    """Return the first `count` peptides of a split, or all that it has by default."""
    count = SIZES[split] if count is None else count
    index = torch.arange(count)
    rng = Rng.of(_SEEDS[split], torch.zeros_like(index), index)
    length = SHORTEST + rng.integers("length", LONGEST - SHORTEST + 1)
    region = _regions(rng)
    up = rng.bernoulli("lean", 0.5, LONGEST, 2)
    spread = (2 * rng.uniform("spread", LONGEST, 2, dtype=torch.float64) - 1) * _SPREAD
    lean = torch.where(up, _LEAN, -_LEAN) + spread
    omega = 180 + 4 * rng.normal("omega", LONGEST, dtype=torch.float64)
    backbone = build_backbone(_PHI[region] + lean[..., 0], _PSI[region] + lean[..., 1], omega)
    before = torch.cat([region[:, :1], region[:, :-1]], dim=1)
    column = 2 * up[..., 0] + up[..., 1] + 4 * (region != before)
    residue = _KINDS[region, column]
    stray = rng.bernoulli("stray", _NOISE, LONGEST)
    residue = torch.where(stray, rng.integers("any", len(RESIDUES), LONGEST), residue)
    chi = _torsions(rng, residue, region, before, up)
    sides = build_side_chains(residue.flatten(), backbone.flatten(0, 1), chi.flatten(0, 1)).unflatten(0, (count, -1))
    return [
        _chain(f"peptide_{i:04d}", residue[i, :size], backbone[i, :size], chi[i, :size], sides[i, :size])
        for i, size in enumerate(length.tolist())
    ]


def _regions(rng: Rng) -> Tensor:
    """(n, L): each residue stays in the region of the previous one or goes to another."""
    stay = torch.tensor(_STAY, dtype=torch.float64)
    coin = rng.uniform("stay", LONGEST, dtype=torch.float64)
    other = rng.integers("region", len(_STAY), LONGEST)
    regions = [other[:, 0]]
    for i in range(1, LONGEST):
        last = regions[-1]
        regions.append(torch.where(coin[:, i] < stay[last], last, other[:, i]))
    return torch.stack(regions, dim=1)


def _torsions(rng: Rng, residue: Tensor, region: Tensor, before: Tensor, up: Tensor) -> Tensor:
    """(n, L, 4) degrees; 0 where a residue has no such torsion."""
    first = _ROTAMERS[(region + before + up[..., 0]) % 3]
    second = _ROTAMERS[torch.where(up[..., 1], 1, (region + 2) % 3)]
    planar = torch.isin(residue, torch.tensor(_PLANAR))
    second = torch.where(planar, torch.where(up[..., 1], 80.0, -10.0), second)
    third = _ROTAMERS[(before + 1) % 3]
    fourth = torch.full_like(first, 180.0)
    chi = torch.stack([first, second, third, fourth], dim=-1)
    chi = chi + 6 * rng.normal("chi", LONGEST, TORSIONS, dtype=torch.float64)
    # Proline's ring puckers up or down.
    pucker = torch.where(up[..., 0], 28.0, -28.0)
    ring = torch.stack([pucker, -1.3 * pucker, 0 * pucker, 0 * pucker], dim=-1)
    chi = torch.where((residue == _PROLINE)[..., None], ring, chi)
    return torch.where(torsion_table()[residue], torch.remainder(chi + 180, 360) - 180, 0.0)


def _chain(name: str, residue: Tensor, backbone: Tensor, chi: Tensor, sides: Tensor) -> Chain:
    size = len(residue)
    return Chain(
        name=name,
        residue=residue,
        backbone=backbone.float(),
        present=torch.ones(size, len(BACKBONE), dtype=torch.bool),
        linked=torch.arange(size) > 0,
        chi=chi.float(),
        has_chi=torsion_table()[residue],
        numbers=[str(i + 1) for i in range(size)],
        sides=sides.float(),
    )
