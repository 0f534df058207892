"""Recomputed activations change memory, and nothing else."""

from pathlib import Path

import pytest
import tiny
import torch
from engine import train, trainer

from lockstep.distributed import World
from lockstep.sharding.blocks import find_blocks, recompute

FLAGS = ["--batch_size", "4", "--gradient_accumulation_steps", "2", "--n_steps", "3", "--log_every", "1"]


@pytest.mark.parametrize("flags", [[], ["--exact"]])
def test_recomputed_activations_give_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    """With dropout too, whose random numbers are drawn twice."""
    results = []
    for what in ("none", "blocks", "selective"):
        words = [*FLAGS, *flags, "--activation_checkpointing", what, "--out", str(tmp_path / what)]
        results.append(train(World(), "DeepWithDropout", words))
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all(torch.equal(results[0][name], tensor) for name, tensor in other.items())


def kept_numbers(model: torch.nn.Module) -> int:
    """How many numbers a forward pass keeps for backward, weights aside."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(64, 6))
    return sum(tensor.numel() for tensor in kept.values())


def test_blocks_keep_only_their_inputs() -> None:
    models = [tiny.Residual(11, 0.0), tiny.Residual(11, 0.0)]
    assert recompute(models[1], "blocks") == 3
    plain, recomputed = map(kept_numbers, models)
    assert recomputed < plain / 3


def test_blocks_are_found_in_lists_and_sequences() -> None:
    model = tiny.Residual(11, 0.0)
    assert find_blocks(model) == list(model.blocks)
    deep = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()))
    assert find_blocks(deep) == [deep[1]]


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="This model has none; use none"):
        trainer(World(), "Tiny", ["--activation_checkpointing", "blocks", "--out", str(tmp_path)])
