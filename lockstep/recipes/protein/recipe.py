"""Masked fragment modelling of protein side chains.

Training: the model sees the backbone of a protein and its side chains as sequences of fragments, of which 15 % are
masked. It learns to predict the masked fragments and the side-chain torsions. Prediction sees the backbone alone.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...config import check
from ...recipe import (
    Augments,
    Batch,
    Describes,
    EmbedsData,
    Loss,
    Predicts,
    Recipe,
    SeveralTerms,
    Split,
    Sums,
    Tests,
    loss_means,
    loss_sums,
)
from ...rng import Rng
from ..confusion import accuracy, confusion_matrix
from . import chain, data, geometry, measure, results
from .chemistry import RESIDUES, UNKNOWN, slot_table, symmetry_table
from .library import Library
from .masking import Masked, Masking, mask_all, mask_slots
from .model import SideChains, Size
from .peptides import peptides
from .structures import write

_EMBEDDED = 400
"""Peptides of the embedded set that `lockstep data` writes."""
_MAX_RESIDUES = 4096
"""Residues, with padding, that go through the model at once in evaluation and prediction."""


@dataclass
class ProteinOptions:
    pdb_path: str | None = None
    """A folder of .pdb, .ent and .cif files, also .gz, at any depth; without it, embedded peptides."""
    cache_dir: str | None = None
    """Where parsed files are cached; by default .lockstep in pdb_path."""
    val_share: float = 0.1
    """Fraction of the files, chosen by a hash of their names, for validation."""
    test_share: float = 0.1
    """The same for testing."""
    max_length: int = 512
    """Longer chains are cropped: at random in each epoch of training, to their middle in evaluations."""
    mask_ratio: float = 0.15
    """Fraction of the fragments that are masked."""
    masking_strategy: Literal["random", "block"] = "random"
    """Mask fragments one by one, or in blocks along the chain."""
    block_size: int = 8
    """Fragments per block."""
    backbone_only: float = 0.1
    """Fraction of training samples in which all side chains are masked: what `lockstep predict` relies on."""
    torsion_weight: float = 1.0
    """Weight of the torsion term of the loss; the fragment term has weight 1."""
    hidden_dim: int = 256
    """Width of the model."""
    num_encoder_layers: int = 3
    """Message-passing layers of the encoder."""
    num_decoder_layers: int = 3
    """Layers of the transformer over side-chain tokens."""
    num_heads: int = 8
    """Attention heads of the decoder."""
    num_neighbors: int = 30
    """Nearest residues that each residue gets messages from."""
    dropout: float = 0.0
    """Dropout in encoder and decoder."""

    def __post_init__(self) -> None:
        check(0 < self.mask_ratio < 1, "mask_ratio is between 0 and 1", self.mask_ratio, "0.15 is usual")
        check(0 <= self.backbone_only <= 1, "backbone_only is in [0, 1]", self.backbone_only, "0.1 is usual")
        valid = min(self.val_share, self.test_share) >= 0 and self.val_share + self.test_share < 1
        shares = f"{self.val_share} and {self.test_share}"
        check(valid, "val_share and test_share are 0 or more and leave some files for training", shares)
        for name in ("num_encoder_layers", "num_decoder_layers", "num_neighbors", "block_size", "num_heads"):
            check(getattr(self, name) >= 1, f"{name} is at least 1", getattr(self, name))
        unit = 2 * self.num_heads
        fits, fitting = self.hidden_dim > 0 and self.hidden_dim % unit == 0, max(1, self.hidden_dim // unit) * unit
        width = f"{self.hidden_dim} for {self.num_heads} heads"
        check(fits, "hidden_dim is a multiple of twice num_heads", width, f"{fitting} would do")
        check(self.max_length >= 8, "max_length is at least 8", self.max_length, "512 is usual")
        check(0 <= self.dropout < 1, "dropout is in [0, 1)", self.dropout, "0 is usual")
        check(self.torsion_weight >= 0, "torsion_weight is 0 or more", self.torsion_weight, "1 is usual")


class ProteinRecipe(Recipe, Augments, SeveralTerms, Tests, Predicts, EmbedsData, Describes):
    """Side-chain fragments and torsions from backbone geometry, by masking."""

    Options: ClassVar[type] = ProteinOptions
    options: ProteinOptions
    defaults = {
        "batch_size": 4,
        "epochs": 50,
        "optimizer": "adamw",
        "lr": 1e-4,
        "weight_decay": 1e-5,
        "clip_grad": 1.0,
        "schedule": "cosine",
        "warmup_epochs": 1,
        "eval_every": "1ep",
        "save_every": "1ep",
    }
    presets = {
        # A minute or two on two CPU cores: a narrow model on the embedded peptides.
        "laptop": {
            "hidden_dim": 64,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_neighbors": 10,
            "backbone_only": 0.3,
            "global_batch_size": 16,
            "batch_size": 16,
            "n_steps": 400,
            "lr": 3e-3,
            "warmup_epochs": 0,
            "warmup_steps": 50,
            "log_every": 20,
            "eval_every": 100,
            "save_every": 200,
        },
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._datasets: dict[Split, data.Chains | None] = {}
        self._library: Library | None = None

    def model(self) -> nn.Module:
        o = self.options
        layers = o.num_encoder_layers, o.num_decoder_layers
        return SideChains(Size(o.hidden_dim, *layers, o.num_heads, o.num_neighbors, o.dropout))

    def dataset(self, split: Split) -> data.Chains | None:
        if split not in self._datasets:
            self._datasets[split] = self._load(split)
        return self._datasets[split]

    def _load(self, split: Split) -> data.Chains | None:
        options = self.options
        if options.pdb_path is None:
            found: data.Chains | None = data.EmbeddedPeptides(split)
        else:
            self._library = self._library or data.open_library(options.pdb_path, options.cache_dir)
            found = data.library_split(self._library, split, options.val_share, options.test_share)
        return found if found is None or split == "train" else data.CentreCropped(found, options.max_length)

    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        masked = self._mask(batch, rng, self.options.backbone_only)
        fragments, torsions = self._logits(model, batch, masked.tokens)
        return Loss.of_terms(**self._terms(fragments, torsions, batch, masked.loss_mask))

    def _mask(self, batch: Batch, rng: Rng, backbone_only: float) -> Masked:
        o = self.options
        masking = Masking(o.masking_strategy, o.mask_ratio, o.block_size, backbone_only)
        return mask_slots(batch["slots"], batch["present"][..., 1], rng, masking, o.max_length)

    def _logits(self, model: nn.Module, batch: Batch, slots: Tensor) -> tuple[Tensor, Tensor]:
        fragments, torsions = model(batch["backbone"], batch["present"], batch["linked"], slots)
        dtype = torch.get_default_dtype()
        return fragments.to(dtype), torsions.to(dtype)

    def _terms(self, fragments: Tensor, torsions: Tensor, batch: Batch, loss_mask: Tensor) -> dict[str, Tensor]:
        """The sums over masked tokens and over measured torsions."""
        token = -fragments.log_softmax(-1).gather(-1, batch["slots"][..., None]).squeeze(-1)
        log_bins = torsions.log_softmax(-1)
        below, above, fraction = geometry.to_bins(batch["chi"], batch["symmetric"])
        bins = torch.lerp(
            log_bins.gather(-1, below[..., None]).squeeze(-1),
            log_bins.gather(-1, above[..., None]).squeeze(-1),
            fraction,
        )
        return {
            "fragments": (token * loss_mask).sum(),
            "torsions": -self.options.torsion_weight * (bins * batch["has_chi"]).sum(),
        }

    def collate(self, items: list[Any]) -> Batch:
        batch = chain.pad(items, UNKNOWN)
        return batch | {"slots": slot_table()[batch["residue"]], "symmetric": symmetry_table()[batch["residue"]]}

    def sample_costs(self, dataset: data.Chains) -> Sequence[float]:
        return data.lengths_of(dataset, self.options.max_length)

    def augment(self, item: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        """Crop a chain that is too long at random."""
        spare = len(item["residue"]) - self.options.max_length
        if spare <= 0:
            return item
        return chain.crop(item, int(rng.integers("crop", spare + 1)), self.options.max_length)

    def term_counts(self, batch: Batch, rng: Rng) -> dict[str, Tensor]:
        return _counts(batch, self._mask(batch, rng, self.options.backbone_only))

    def evaluate_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        """Predict twice: with fragments masked as in training, and from the backbone alone."""
        sums: dict[str, Any] = {}
        for part, keys in _chunks(batch, rng.keys):
            masked = self._mask(part, Rng(keys), backbone_only=0.0)
            fragments, torsions = self._logits(model, part, masked.tokens)
            terms = self._terms(fragments, torsions, part, masked.loss_mask)
            counted = loss_sums(Loss.of_terms(**terms), _counts(part, masked))
            counted |= measure.fragment_counts(fragments, part["slots"], masked.loss_mask)
            counted |= measure.torsion_counts(torsions, part["chi"], part["has_chi"], part["symmetric"])
            for name, value in (counted | self._from_backbone(model, part)).items():
                sums[name] = sums[name] + value if name in sums else value
        return sums

    def _from_backbone(self, model: nn.Module, batch: Batch) -> Sums:
        masked = mask_all(batch["slots"], batch["present"][..., 1])
        fragments, torsions = self._logits(model, batch, masked.tokens)
        sums = measure.fragment_counts(fragments, batch["slots"], masked.loss_mask)
        sums |= measure.torsion_counts(torsions, batch["chi"], batch["has_chi"], batch["symmetric"])
        predicted = measure.residue_scores(fragments).argmax(-1)
        sums["confusion"] = confusion_matrix(predicted, batch["residue"], len(RESIDUES))
        return {f"backbone {name}": value for name, value in sums.items()}

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        values = loss_means({name: sums[name] for name in ("fragments", "torsions")})
        for prefix in ("", "backbone "):
            measured = measure.fragment_values(sums, prefix) | measure.torsion_values(sums, prefix)
            values |= {prefix.replace(" ", "_") + name: value for name, value in measured.items()}
        return values | {"backbone_residue_accuracy": accuracy(sums["backbone confusion"])}

    def same_as_training(self) -> Collection[str]:
        """The loss and its terms, unless training also predicts from the backbone alone, which is harder."""
        return () if self.options.backbone_only else ("loss", "fragments", "torsions")

    def save_test(self, sums: dict[str, Tensor], values: dict[str, float], folder: Path) -> list[Path]:
        return results.save_test(sums, folder)

    def predict_dataset(self, path: Path) -> data.Inputs:
        return data.Inputs(path)

    def predict_batch(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Predict residues from the backbone alone, then the torsions of these residues."""
        table, symmetries = slot_table().to(batch["slots"].device), symmetry_table().to(batch["slots"].device)
        made: list[Any] = []
        for part, _ in _chunks(batch, torch.arange(len(batch["residue"]))):
            real = part["present"][..., 1]
            fragments, _ = self._logits(model, part, mask_all(part["slots"], real).tokens)
            probability, residue = measure.residue_scores(fragments).exp().max(-1)
            residue = torch.where(real, residue, UNKNOWN)
            _, torsions = self._logits(model, part, table[residue])
            bins, symmetric = torsions.softmax(-1), symmetries[residue]
            chi = geometry.from_bins(bins, symmetric)
            confidence = geometry.within(bins, chi, symmetric, measure.NEAR)
            prediction = {"residue": residue, "probability": probability, "chi": chi, "confidence": confidence}
            sizes = real.sum(1).tolist()
            made += [{name: x[i, :size] for name, x in prediction.items()} for i, size in enumerate(sizes)]
        return made

    def save_predictions(self, predictions: list[Any], dataset: data.Inputs, folder: Path) -> list[Path]:
        return results.save_predictions(predictions, dataset, folder)

    def describe_predictions(self, predictions: list[Any], dataset: data.Inputs) -> str:
        probability = torch.cat([prediction["probability"].flatten() for prediction in predictions])
        skipped = f"; {len(dataset.skipped)} skipped, see skipped.txt" if dataset.skipped else ""
        counts = f"{len(predictions)} chain(s), {len(probability)} residues"
        return f"{counts}, mean probability {probability.mean():.3f}{skipped}"

    def write_data(self, folder: Path) -> str:
        for made in peptides("train", _EMBEDDED):
            write([made], [torch.zeros(len(made), results.ATOMS)], folder / f"{made.name}.pdb")
        return f"{_EMBEDDED} peptides of ideal geometry as PDB files in {folder}; train with --pdb_path {folder}"

    def describe_model(self, model: nn.Module) -> str:
        o = self.options
        return (
            f"{o.num_encoder_layers} message-passing layers over {o.num_neighbors} neighbours,"
            f" {o.num_decoder_layers} transformer layers with {o.num_heads} heads, width {o.hidden_dim}"
        )

    def describe_data(self, split: Split) -> str:
        found = self.dataset(split)
        return "" if found is None else f"{found.source}, {len(found):,} chains, {sum(found.lengths):,} residues"


def _counts(batch: Batch, masked: Masked) -> dict[str, Tensor]:
    """Return what each term of the loss is a mean over: masked tokens and measured torsions."""
    return {"fragments": masked.loss_mask.sum(), "torsions": batch["has_chi"].sum()}


def _chunks(batch: Batch, keys: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Split a batch so that each part has at most _MAX_RESIDUES residues, or one chain."""
    n, length = batch["residue"].shape
    step = max(1, _MAX_RESIDUES // length)
    for start in range(0, n, step):
        yield {name: x[start : start + step] for name, x in batch.items()}, keys[start : start + step]
