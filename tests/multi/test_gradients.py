"""What gradients are sent as, in which pieces, and what ranks agree on meanwhile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine import trainer
from torch import Tensor

from lockstep.config import Hardware
from lockstep.distributed import World
from lockstep.step import OUT_OF_MEMORY
from multi.ranks import Ranks

Get = Callable[[int], Ranks]
FLAGS = ["--n_steps", "6", "--batch_size", "6", "--precision", "fp32"]


def trained(world: World, flags: list[str]) -> tuple[dict[str, Tensor], list[bool]]:
    """The weights, and of each step whether the agreement was asked for before backward had ended."""
    run = trainer(world, "Labelled", [*FLAGS, *flags])
    agree, early = run.step._agree, list[bool]()

    def recorded(request: int) -> int:
        early.append(run.step._answer is not None)
        return agree(request)

    run.step._agree = recorded  # type: ignore[method-assign]
    run.fit()
    return run.model.state_dict(), early


def test_compressed_gradients_are_half_as_many_bytes_and_train_nearly_the_same(ranks: Get, tmp_path: Path) -> None:
    (whole, early), _ = ranks(2)(trained, ["--out", str(tmp_path / "fp32")])
    assert early == [True] * 6
    flags = ["--grad_compression", "bf16", "--bucket_mb", "1", "--out", str(tmp_path / "bf16")]
    (first, _), (second, _) = ranks(2)(trained, flags)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        torch.testing.assert_close(tensor, whole[name], rtol=0.05, atol=0.02)
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in first.items())
    said = [json.loads((tmp_path / kind / "receipt.json").read_text())["gradients"] for kind in ("fp32", "bf16")]
    assert "as float32, 1 bucket(s)" in said[0] and "as bfloat16, 1 bucket(s)" in said[1]


def agreed(world: World) -> tuple[int, int]:
    first = world.start_all_reduce_max(15 * (world.rank == 1))
    second = world.start_all_reduce_max(OUT_OF_MEMORY * (world.rank == 2))
    return first(), second()


def test_the_most_urgent_request_of_any_rank_is_what_all_agree_on(ranks: Get) -> None:
    assert ranks(3)(agreed) == [(15, OUT_OF_MEMORY)] * 3


def test_an_exact_run_refuses_rounded_sums() -> None:
    with pytest.raises(ValueError, match="exact takes --grad_compression none"):
        Hardware(exact=True, grad_compression="bf16")
