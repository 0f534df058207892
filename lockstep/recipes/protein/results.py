"""What a test and a prediction of `protein` write: tables, a picture, PDB files."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...files import write_text
from ..report import draw_confusion, figure, save_figure, write_table
from .build import SIDE_ATOMS, build_side_chains
from .chain import Chain
from .chemistry import BACKBONE, FRAGMENTS, RESIDUES, SIDE_CHAINS, SPECIAL, TOKENS, TORSIONS, UNKNOWN, torsion_table
from .data import Inputs
from .library import plain_name
from .measure import UNITS
from .structures import write

ATOMS = len(BACKBONE) + SIDE_ATOMS


def save_test(sums: dict[str, Tensor], folder: Path) -> list[Path]:
    """Write tables of fragments, torsions and residues, and the residues' confusion matrix as a picture."""
    confusion = sums["backbone confusion"]
    residues = [
        [name, *_fraction(confusion[kind, kind], confusion[kind].sum()), *confusion[kind].tolist()]
        for kind, name in enumerate(RESIDUES)
    ]
    made = [
        write_table(folder / "fragments.csv", _header("fragment", "count", "accuracy"), _fragment_rows(sums)),
        write_table(
            folder / "torsions.csv",
            _header("torsion", "count", "mean error in degrees", "within 20"),
            _torsion_rows(sums),
        ),
        write_table(folder / "residues.csv", ["given", "count", "accuracy", *RESIDUES], residues),
    ]
    if find_spec("matplotlib") is None:
        return made
    picture, axes = figure(7.2, 6.4)
    draw_confusion(picture, axes, confusion, RESIDUES)
    axes.set(xlabel="predicted from the backbone", ylabel="given", title="")
    return [*made, save_figure(picture, folder / "residues.png")]


_CONDITIONS = {"masked": "", "from backbone": "backbone "}
"""What an evaluation predicts from, and the prefix of its sums."""


def _header(first: str, *columns: str) -> list[str]:
    return [first, *(f"{condition} {column}" for condition in _CONDITIONS for column in columns)]


def _fragment_rows(sums: dict[str, Tensor]) -> Iterator[list[Any]]:
    for token in range(SPECIAL - 1, len(TOKENS)):
        row: list[Any] = [TOKENS[token]]
        for prefix in _CONDITIONS.values():
            row += _fraction(sums[prefix + "fragment hits"][token], sums[prefix + "fragment count"][token])
        yield row


def _torsion_rows(sums: dict[str, Tensor]) -> Iterator[list[Any]]:
    for k in range(TORSIONS):
        row: list[Any] = [f"chi{k + 1}"]
        for prefix in _CONDITIONS.values():
            count = sums[prefix + "torsion count"][k]
            error = int(sums[prefix + "torsion error"][k]) / UNITS / max(1, int(count))
            row += [int(count), f"{error:.3f}", _fraction(sums[prefix + "torsion hits"][k], count)[1]]
        yield row


def _fraction(hits: Tensor, count: Tensor) -> list[Any]:
    return [int(count), f"{int(hits) / max(1, int(count)):.4f}"]


def save_predictions(predictions: list[Any], dataset: Inputs, folder: Path) -> list[Path]:
    """Write a PDB file for each input, with the predicted side chains, and one table of all residues."""
    by_file: dict[str, list[int]] = {}
    for i, file in enumerate(dataset.files):
        by_file.setdefault(file, []).append(i)
    header = ["file", "chain", "number", "given", "predicted", "probability", "fragments"]
    header += [f"chi{k + 1}" for k in range(TORSIONS)]
    header += [f"chi{k + 1} probability within 20" for k in range(TORSIONS)]
    rows: list[list[Any]] = []
    made: list[Path] = []
    for file, numbers in by_file.items():
        chains, values = [], []
        for i in numbers:
            chain, column = rebuilt(dataset.chains[i], predictions[i])
            chains.append(chain)
            values.append(column)
            rows += _rows(file, dataset.chains[i], predictions[i])
        made.append(_unused(folder / Path(file).parent / f"{plain_name(file)}.pdb", made))
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        write(chains, values, made[-1])
    table = write_table(folder / "predictions.csv", header, rows)
    if dataset.skipped:
        skipped = folder / "skipped.txt"
        write_text(skipped, "".join(f"{name}: {why}\n" for name, why in dataset.skipped.items()))
        made.append(skipped)
    return [table, *made]


def _unused(path: Path, used: list[Path]) -> Path:
    """Return the path, or one with a number where 1abc.pdb and 1abc.cif both have predictions."""
    name, k = path, 2
    while name in used:
        name, k = path.with_name(f"{path.stem}-{k}.pdb"), k + 1
    return name


def rebuilt(chain: Chain, prediction: dict[str, Tensor]) -> tuple[Chain, Tensor]:
    """Return the chain with predicted residues and ideal side chains, and the confidence of each atom in percent."""
    residue, chi = prediction["residue"].cpu(), prediction["chi"].double().cpu()
    sides = build_side_chains(residue, chain.backbone.double(), chi)
    sides[~chain.present[:, :3].all(1)] = torch.nan  # no frame to build on
    kind, confidence = prediction["probability"].double().cpu(), prediction["confidence"].double().cpu()
    column = (100 * kind)[:, None].repeat(1, ATOMS)
    for i, name in enumerate(RESIDUES[k] if k < UNKNOWN else "" for k in residue.tolist()):
        for k in range(len(SIDE_CHAINS.get(name, []))):
            turns = _turns(name, k)
            column[i, len(BACKBONE) + k] *= confidence[i, :turns].prod()
    made = Chain(
        chain.name, residue, chain.backbone, chain.present, chain.linked, chi.float(), torsion_table()[residue]
    )
    made.numbers, made.sides = chain.numbers, sides.float()
    return made, column


def _turns(name: str, number: int) -> int:
    """Return how many of chi1, chi2, … the position of a side-chain atom depends on."""
    atoms = SIDE_CHAINS[name]
    by_name = {atom.name: i for i, atom in enumerate(atoms)}
    own = atoms[number].chi
    if own is not None:
        return own + 1
    return max((_turns(name, by_name[x]) for x in atoms[number].after if x in by_name), default=0)


def _rows(file: str, chain: Chain, prediction: dict[str, Tensor]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    residues = zip(*(prediction[x].tolist() for x in ("residue", "probability", "chi", "confidence")), strict=True)
    for i, (kind, probability, chi, confidence) in enumerate(residues):
        given = int(chain.residue[i])
        has = torsion_table()[kind].tolist()
        rows.append([file, chain.name, chain.numbers[i], RESIDUES[given] if given < UNKNOWN else "UNK"])
        rows[-1] += [RESIDUES[kind], f"{probability:.4f}", "-".join(FRAGMENTS[RESIDUES[kind]])]
        rows[-1] += [f"{x:.1f}" if exists else "" for x, exists in zip(chi, has, strict=True)]
        rows[-1] += [f"{x:.4f}" if exists else "" for x, exists in zip(confidence, has, strict=True)]
    return rows
