"""PDB and mmCIF files, read and written with gemmi.

    chains = read(Path("1abc.cif.gz"))           # the protein chains of the first model
    write(chains, values, Path("out.pdb"))       # values for the B-factor column

Of several models the first is read, of alternate locations the one with the highest occupancy in the residue. Missing
atoms are marked; chain breaks follow from the distance of C to the next N, not from residue numbers. MSE is read as
MET, other modified residues as unknown. Insertion codes are read; DNA, ligands and water are left out.
"""

import gzip
import itertools
import math
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...files import write_text
from ..folders import special_kind
from .build import SIDE_ATOMS
from .chain import Chain
from .chemistry import BACKBONE, CHI_ATOMS, RESIDUES, SIDE_CHAINS, TORSIONS, UNKNOWN
from .geometry import torsion

PARSER = 2
"""Version of the reader; raise it when its results change, so that older caches are not used."""
ENDINGS = tuple(f"{ending}{packed}" for ending in (".pdb", ".ent", ".cif") for packed in ("", ".gz"))
SHORTEST = 3
"""Chains with fewer residues are left out."""
_LONGEST_BOND = 2.0
"""Å between C and N, above which they are not bonded."""
_FARTHEST = 1e5
"""Å from the origin, beyond which a position is an error."""
_COORDINATES = (slice(30, 38), slice(38, 46), slice(46, 54))
"""The columns of x, y and z in a PDB line."""
_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
_SAME = {"MSE": "MET"}
_SAME_ATOM = {("MSE", "SE"): "SD"}

_NOWHERE = (0.0, 0.0, 0.0)

Point = tuple[float, float, float]
Atoms = dict[str, Point]


def gemmi() -> Any:
    """Import the library, or say how to install it."""
    try:
        import gemmi as library
    except ImportError:
        raise ValueError("PDB and mmCIF files are read with gemmi: pip install 'lockstep-train[protein]'") from None
    return library


def read(path: Path) -> list[Chain]:
    """Return the protein chains of the first model; a ValueError says why there are none."""
    library = gemmi()
    if kind := special_kind(path):
        raise ValueError(f"is {kind}, not a file")
    try:
        structure = _open(path, library)
    except Exception as error:  # gemmi and gzip raise RuntimeError, ValueError, OSError, EOFError, zlib.error ...
        raise ValueError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not len(structure) or not any(len(chain) for chain in structure[0]):
        raise ValueError("holds no atoms")
    structure.setup_entities()
    made = [_chain(chain, library) for chain in structure[0]]
    chains = [chain for chain in made if chain is not None]
    if not chains:
        raise ValueError(f"holds no protein chain of {SHORTEST} residues or more")
    return chains


def _open(path: Path, library: Any) -> Any:
    """Parse the file; Python's gzip detects one that ends too early."""
    name, content = path.name.lower(), path.read_bytes()
    if name.endswith(".gz"):
        name, content = name.removesuffix(".gz"), gzip.decompress(content)
    text = content.decode("utf-8", errors="replace")
    if name.endswith(".cif"):
        return library.make_structure_from_block(library.cif.read_string(text)[0])
    _check_columns(text)
    return library.read_pdb_string(text)


def _check_columns(text: str) -> None:
    """Refuse coordinates that are no numbers in the PDB lines of the first model: gemmi would read them as 0."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("ENDMDL"):
            return
        if line.startswith(("ATOM  ", "HETATM")):
            try:
                for column in _COORDINATES:
                    float(line[column])
            except ValueError:
                at = line[_COORDINATES[0].start : _COORDINATES[-1].stop]
                raise ValueError(f"line {number}: the coordinates are three numbers, not {at!r}") from None


def _chain(chain: Any, library: Any) -> Chain | None:
    residues = [atoms for atoms in _residues(chain, library) if "CA" in atoms[2]]
    if len(residues) < SHORTEST:
        return None
    size = len(residues)
    kinds = [RESIDUES.index(kind) if kind in RESIDUES else UNKNOWN for _, kind, _ in residues]
    backbone = torch.tensor([[atoms.get(name, _NOWHERE) for name in BACKBONE] for _, _, atoms in residues])
    present = torch.tensor([[name in atoms for name in BACKBONE] for _, _, atoms in residues])
    chi, has_chi = torch.zeros(size, TORSIONS), torch.zeros(size, TORSIONS, dtype=torch.bool)
    found = [(i, k, four) for i, (_, kind, atoms) in enumerate(residues) for k, four in _fours(kind, atoms)]
    if found:
        rows, columns = torch.tensor([i for i, _, _ in found]), torch.tensor([k for _, k, _ in found])
        points = torch.tensor([four for _, _, four in found], dtype=torch.float64)
        chi[rows, columns] = torsion(*points.unbind(1)).rad2deg().float()
        has_chi[rows, columns] = True
    return Chain(
        name=chain.name,
        residue=torch.tensor(kinds),
        backbone=backbone,
        present=present,
        linked=_linked(backbone, present),
        chi=chi,
        has_chi=has_chi,
        numbers=[number for number, _, _ in residues],
    )


def _residues(chain: Any, library: Any) -> Iterable[tuple[str, str, Atoms]]:
    """Number, name and atoms of each amino acid of the polymer, in the order of the file."""
    polymer = library.EntityType.Polymer
    by_number: dict[str, list[Any]] = {}  # several with one number: a point mutation in part of the crystal
    for residue in chain:
        if residue.entity_type in (polymer, library.EntityType.Unknown) and _is_amino_acid(residue, library):
            _check_finite(chain, residue)
            number = f"{residue.seqid.num}{residue.seqid.icode}".strip()
            by_number.setdefault(number, []).append(residue)
    for number, group in by_number.items():
        residue = max(group, key=lambda r: max((a.occ for a in r if a.name == "CA"), default=0.0))
        yield number, _SAME.get(residue.name, residue.name), _atoms(residue)


def _check_finite(chain: Any, residue: Any) -> None:
    """Refuse an unknown position (`?` in mmCIF) or occupancy: it would be a NaN in every loss."""
    for atom in residue:
        position = (atom.pos.x, atom.pos.y, atom.pos.z)
        if not all(abs(x) < _FARTHEST for x in position) or not math.isfinite(atom.occ):
            raise ValueError(
                f"chain {chain.name}, residue {residue.name} {residue.seqid}, atom {atom.name}: position "
                f"({', '.join(f'{x:g}' for x in position)}) or occupancy {atom.occ:g} is not a finite number; "
                "give the atom a position or leave it out"
            )


def _is_amino_acid(residue: Any, library: Any) -> bool:
    """Decide by the name of the residue or, if gemmi does not know it, by its atoms."""
    if not any(atom.name == "CA" and atom.element.name == "C" for atom in residue):
        return False  # a calcium ion is called CA as well
    known = library.find_tabulated_residue(residue.name)
    names = {atom.name for atom in residue}
    return known.is_amino_acid() if known.found() else bool({"N", "C"} <= names)


def _atoms(residue: Any) -> Atoms:
    """Return one position per atom: of the residue's most occupied alternate location, if the atom has it."""
    total: dict[str, float] = {}
    for atom in residue:
        if atom.altloc != "\0":
            total[atom.altloc] = total.get(atom.altloc, 0.0) + atom.occ
    chosen = max(sorted(total), key=total.__getitem__) if total else ""
    best: dict[str, tuple[bool, float]] = {}
    positions: Atoms = {}
    for atom in residue:
        name = _SAME_ATOM.get((residue.name, atom.name), atom.name)
        rank = (atom.altloc in ("\0", chosen), atom.occ)
        if name not in best or rank > best[name]:
            best[name], positions[name] = rank, (atom.pos.x, atom.pos.y, atom.pos.z)
    return positions


def _fours(kind: str, atoms: Atoms) -> Iterable[tuple[int, list[Point]]]:
    """Yield number and atoms of the side-chain torsions that can be measured."""
    path = CHI_ATOMS.get(kind, ())
    for k in range(len(path) - 3):
        if all(name in atoms for name in path[k : k + 4]):
            yield k, [atoms[name] for name in path[k : k + 4]]


def _linked(backbone: Tensor, present: Tensor) -> Tensor:
    """(L,): whether the C of the previous residue is bonded to this N."""
    length = (backbone[1:, 0] - backbone[:-1, 2]).norm(dim=-1)
    bonded = (length < _LONGEST_BOND) & present[1:, 0] & present[:-1, 2]
    return torch.cat([torch.zeros(1, dtype=torch.bool), bonded])


def write(chains: Sequence[Chain], values: Sequence[Tensor], path: Path) -> None:
    """Write chains with their side-chain atoms as PDB, with the `values` (L, 14) of each in the B-factor column.

    The values are those of N, CA, C, O and of the side chain's atoms in the order of SIDE_CHAINS.
    """
    lines: list[str] = []
    letters = _letters([chain.name for chain in chains])
    for letter, chain, column in zip(letters, chains, values, strict=True):
        lines += _lines(chain, letter, column, len(lines) + 1)
    write_text(path, "\n".join([*lines, "END", ""]))


def _letters(names: list[str]) -> list[str]:
    """Return one letter per chain: its own name if that is one letter, else one that is not used."""
    used = [name for name in names if len(name) == 1]
    free = itertools.chain((x for x in _LETTERS if x not in used), itertools.cycle(_LETTERS))
    return [name if len(name) == 1 else next(free) for name in names]


def _lines(chain: Chain, letter: str, values: Tensor, serial: int) -> list[str]:
    assert chain.sides is not None and values.shape == (len(chain), len(BACKBONE) + SIDE_ATOMS)
    positions, columns = torch.cat([chain.backbone, chain.sides], dim=1).tolist(), values.tolist()
    lines: list[str] = []
    for i, kind in enumerate(chain.residue.tolist()):
        name = RESIDUES[kind] if kind < UNKNOWN else "UNK"
        number = chain.numbers[i].rstrip(string.ascii_letters)
        code = chain.numbers[i][len(number) :] or " "
        where = f"{name:>3} {letter}{int(number) % 10_000 if int(number) > 0 else int(number):4d}{code}"
        exists = [*chain.present[i].tolist(), *[True] * SIDE_ATOMS]
        names = [*BACKBONE, *(atom.name for atom in SIDE_CHAINS.get(name, []))]
        for atom, has, (x, y, z), value in zip(names, exists, positions[i], columns[i], strict=False):
            if has and math.isfinite(x):
                at = f"{x:8.3f}{y:8.3f}{z:8.3f}{1:6.2f}{value:6.2f}"
                lines.append(
                    f"ATOM  {(serial + len(lines)) % 100_000:5d}  {atom:<3} {where}   {at}          {atom[0]:>2}"
                )
    return [*lines, f"TER   {(serial + len(lines)) % 100_000:5d}      {where}"]
