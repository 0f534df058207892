"""The recipe as users run it: golden losses, and a short form of the laptop preset that learns."""

from pathlib import Path

import pytest
import torch

from lockstep.recipes.protein.chemistry import SPECIAL, slot_table
from lockstep.recipes.protein.peptides import peptides
from recipes.golden import fit, golden, logged


def ten_steps(folder: Path) -> list[float]:
    small = ["--hidden_dim", "32", "--num_encoder_layers", "1", "--num_decoder_layers", "1", "--max_length", "24"]
    small += ["--global_batch_size", "6", "--n_steps", "10", "--log_every", "1", "--eval_every", "0"]
    fit("protein", folder, "--preset", "laptop", *small)
    return logged(folder)


@pytest.mark.slow
def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    assert ten_steps(tmp_path / "run") == pytest.approx(golden("protein"), rel=1e-5)


def majority() -> tuple[float, float]:
    """How often the most frequent fragment, and the most frequent residue, would be right on the validation set."""
    residue = torch.cat([chain.residue for chain in peptides("val")])
    slots = slot_table()[residue]
    fragments = slots[slots >= SPECIAL].bincount()
    return float(fragments.max() / fragments.sum()), float(residue.bincount().max() / len(residue))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_run_is_far_above_the_majority_classes(tmp_path: Path) -> None:
    flags = ["--n_steps", "100", "--eval_every", "0", "--save_every", "0"]
    fit("protein", tmp_path / "run", "--preset", "laptop", *flags)
    fragment, residue = majority()
    assert fragment < 0.5 and residue < 0.15
    assert logged(tmp_path / "run", "val/fragment_accuracy")[-1] > fragment + 0.2
    assert logged(tmp_path / "run", "val/backbone_residue_accuracy")[-1] > residue + 0.25
    assert logged(tmp_path / "run", "val/torsion_error")[-1] < 30  # a guess at random is 86 degrees off
