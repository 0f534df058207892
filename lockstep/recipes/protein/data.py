"""Data sets of chains: embedded peptides, or a folder of PDB and mmCIF files.

    load(None, None, "train", ...)               # the embedded peptides
    load("data/pdb", "data/cache", "val", ...)   # files whose names hash to the validation set

Items are dicts of tensors, one entry per residue; see `chain.py`. A hash of a file's name decides its split: the same
on every rank and machine, whatever else is in the folder.
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...recipe import Split
from . import structures
from .chain import Chain, crop
from .library import Library, hash_fraction, structure_files
from .peptides import peptides


class Chains(Protocol):
    """A set of chains: their lengths, and a few words about their source."""

    lengths: list[int]
    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, Tensor]: ...


class EmbeddedPeptides:
    """The embedded peptides."""

    def __init__(self, split: Split):
        self.chains = peptides(split)
        self.lengths = [len(chain) for chain in self.chains]
        self.source = "embedded peptides"

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.chains[i].item()


class LibraryChains:
    """Some chains of a library, read from its cache on access."""

    def __init__(self, library: Library, numbers: list[int]):
        self.library, self.numbers = library, numbers
        self.lengths = [library.chains[number].length for number in numbers]
        files = len({library.chains[number].file for number in numbers})
        self.source = f"{files:,} files in {library.folder}"
        if library.skipped:
            self.source += f" ({len(library.skipped):,} skipped, listed in {library.list_of_skipped})"

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.library.load(self.numbers[i])


class CentreCropped:
    """The same chains, long ones cropped to their middle: for evaluation, which has no randomness."""

    def __init__(self, chains: Chains, length: int):
        self.chains, self.max_length, self.source = chains, length, chains.source
        self.lengths = [min(x, length) for x in chains.lengths]

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = self.chains[i]
        return crop(item, max(0, (len(item["residue"]) - self.max_length) // 2), self.max_length)


def open_library(pdb_path: str, cache_dir: str | None) -> Library:
    folder = Path(pdb_path).expanduser()
    if not folder.exists():
        raise ValueError(
            f"pdb_path {pdb_path} does not exist; `lockstep data protein {pdb_path}` writes peptides to it"
        )
    near = folder if folder.is_dir() else folder.parent
    return Library(folder, Path(cache_dir).expanduser() if cache_dir else near / ".lockstep")


def library_split(library: Library, split: Split, val: float, test: float) -> LibraryChains | None:
    """Return the chains of one split, or None if it has no file; `val` and `test` are fractions of the files."""
    borders = {"test": (0.0, test), "val": (test, test + val), "train": (test + val, 1.0)}
    low, high = borders[split]
    numbers = [i for i, chain in enumerate(library.chains) if low <= hash_fraction(chain.file) < high]
    if split == "train" and not numbers:
        some = "".join(f"\n  {name}: {why}" for name, why in list(library.skipped.items())[:3])
        if library.chains:
            raise ValueError("all files fall into validation and test by their names; lower --val_share, --test_share")
        raise ValueError(f"no file in {library.folder} holds a protein chain:{some}")
    return LibraryChains(library, numbers) if numbers else None


class Inputs:
    """The chains of the files to predict, not cropped, in the order of the files' names."""

    def __init__(self, path: Path):
        self.chains: list[Chain] = []
        self.files: list[str] = []
        """The file of each chain."""
        self.skipped: dict[str, str] = {}
        structures.gemmi()
        for name, file in structure_files(path).items():
            try:
                found = structures.read(file)
            except ValueError as error:
                self.skipped[name] = str(error)
                continue
            self.chains += found
            self.files += [name] * len(found)
        if not self.chains:
            why = "".join(f"\n  {name}: {reason}" for name, reason in list(self.skipped.items())[:3])
            endings = " ".join(structures.ENDINGS)
            raise ValueError(f"{path} holds no protein chain in a file of kind {endings}{why}")

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.chains[i].item()


def lengths_of(dataset: Chains, longest: int) -> list[float]:
    """Return the cost of each chain: its residues after cropping."""
    return torch.tensor(dataset.lengths).clamp(max=longest).tolist()
