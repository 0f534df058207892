"""The recipe as users run it: golden losses, and a short form of the laptop preset that learns."""

import json
from pathlib import Path

import pytest
import torch
from processes import ROOT

from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.recipe import find
from lockstep.recipes.protein.chemistry import SPECIAL, slot_table
from lockstep.recipes.protein.peptides import peptides
from lockstep.run import settle
from lockstep.trainer import Trainer

GOLDEN = ROOT / "tests/golden/protein.json"


def logged(folder: Path, name: str) -> list[float]:
    return [x[name] for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if name in x]


def train(folder: Path, *flags: str) -> None:
    words = ["--preset", "laptop", "--device", "cpu", "--no_tensorboard", "--out", str(folder), *flags]
    request = parse(find("protein"), words, "test")
    Trainer(request, World(), settle(request, World())).fit()


def ten_steps(folder: Path) -> list[float]:
    small = ["--hidden_dim", "32", "--num_encoder_layers", "1", "--num_decoder_layers", "1", "--max_length", "24"]
    train(folder, *small, "--global_batch_size", "6", "--n_steps", "10", "--log_every", "1", "--eval_every", "0")
    return logged(folder, "loss")


def test_ten_steps_have_their_golden_losses(tmp_path: Path) -> None:
    """`PYTHONPATH=tests python tests/recipes/test_protein_learns.py` writes them anew, where a change was meant."""
    assert ten_steps(tmp_path / "run") == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-5)


def majority() -> tuple[float, float]:
    """How often the most frequent fragment, and the most frequent residue, would be right on the validation set."""
    residue = torch.cat([chain.residue for chain in peptides("val")])
    slots = slot_table()[residue]
    fragments = slots[slots >= SPECIAL].bincount()
    return float(fragments.max() / fragments.sum()), float(residue.bincount().max() / len(residue))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_is_far_above_the_majority_classes(tmp_path: Path) -> None:
    train(tmp_path / "run", "--n_steps", "100", "--eval_every", "0", "--save_every", "0")
    fragment, residue = majority()
    assert fragment < 0.5 and residue < 0.15
    assert logged(tmp_path / "run", "val/fragment_accuracy")[-1] > fragment + 0.2
    assert logged(tmp_path / "run", "val/backbone_residue_accuracy")[-1] > residue + 0.25
    assert logged(tmp_path / "run", "val/torsion_error")[-1] < 30  # a guess at random is 86 degrees off


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        GOLDEN.write_text(json.dumps(ten_steps(Path(made) / "run"), indent=2) + "\n")
