"""Too little memory on one rank: all ranks cut smaller pieces, and the run ends the same."""

from pathlib import Path

import pytest
import torch
from engine import train, trainer

from lockstep.distributed import World

FLAGS = ["--precision", "fp64", "--n_steps", "12", "--global_batch_size", "24", "--batch_size", "12"]


class Burst(torch.autograd.Function):
    """Runs out of memory on the way back."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("injected")


def starved(world: World, flags: list[str], where: str, limit: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """From step 5 on the last rank has room for `limit` samples at once."""
    run = trainer(world, "Labelled", flags)
    loss = run.recipe.loss

    def tight(model, batch, rng):  # type: ignore[no-untyped-def]
        last = world.rank == world.size - 1
        tight_now = run.progress.step >= 5 and last and model.training and len(batch["x"]) > limit
        if tight_now and where == "forward":
            raise torch.OutOfMemoryError("injected")
        result = loss(model, batch, rng)
        if tight_now:  # in the middle: the last layer's gradients are on their way already
            handle = model[2].register_forward_hook(lambda module, inputs, output: Burst.apply(output))
            result = loss(model, batch, rng)
            handle.remove()
        return result

    run.recipe.loss = tight  # type: ignore[method-assign]
    run.step.build()
    run.fit()
    return run.model.state_dict(), run.setup.batching.micro_batch, run.setup.batching.accumulation


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_step_is_redone_in_smaller_pieces_and_ends_the_same(ranks, tmp_path: Path, where: str, world: int) -> None:
    expected = train(World(), "Labelled", [*FLAGS, "--out", str(tmp_path / "whole")])
    flags = [*FLAGS, "--out", str(tmp_path / "tight")]
    results = [starved(World(), flags, where, 3)] if world == 1 else ranks(world)(starved, flags, where, 3)
    for weights, micro, accumulation in results:
        assert micro <= 3 and micro * accumulation * world >= 24
        for name, tensor in expected.items():
            assert (weights[name] - tensor).norm() <= 1e-9 * tensor.norm(), name
    said = (tmp_path / "tight/log.txt").read_text()
    assert said.count("out of memory at step 6") == said.count("out of memory") >= 1


def test_one_sample_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not enough memory for a single sample"):
        starved(World(), [*FLAGS, "--out", str(tmp_path / "run")], "forward", 0)
