"""The number of ranks is not a hyper-parameter: the same weights, metrics and statistics on any world."""

from pathlib import Path

import pytest
import torch
from engine import lines, train
from torch import Tensor, nn

from lockstep.batchnorm import SyncBatchNorm, replace_batch_norm
from lockstep.distributed import World

SLOW, REST = pytest.mark.slow, ("Tiny", "Labelled", "Terms")
STEPS = ["--n_steps", "50", "--precision", "fp64", "--global_batch_size", "64", "--log_every", "1"]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    return max(((a[n].double() - b[n].double()).norm() / a[n].double().norm().clamp(min=1e-30)).item() for n in a)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["WithBatchNorm", "Uneven", *(pytest.param(r, marks=SLOW) for r in REST)])
def test_weights_and_losses_do_not_depend_on_the_world(ranks, tmp_path: Path, recipe: str) -> None:
    flags = [*STEPS, "--batch_size", "64", "--ema_decay", "0.99"]
    alone = train(World(), recipe, [*flags, "--out", str(tmp_path / "1")])
    expected = [line["loss"] for line in lines(tmp_path / "1") if "loss" in line]
    for world in (2, 3, 4):
        out = tmp_path / str(world)
        weights = ranks(world)(train, recipe, [*flags, "--out", str(out)])
        assert apart(alone, weights[0]) < 1e-9
        assert all(apart(weights[0], other) == 0 for other in weights[1:])
        losses = [line["loss"] for line in lines(out) if "loss" in line]
        assert losses == pytest.approx(expected, rel=1e-10)
        assert [line["val/loss"] for line in lines(out) if "val/loss" in line] == pytest.approx(
            [line["val/loss"] for line in lines(tmp_path / "1") if "val/loss" in line], rel=1e-10
        )


@pytest.mark.parametrize(
    ("world", "micro", "recipe"), [(1, 5, "Labelled"), (2, 7, "Terms"), pytest.param(3, 4, "Uneven", marks=SLOW)]
)
def test_accumulation_instead_of_ranks_gives_the_same(
    ranks, tmp_path: Path, world: int, micro: int, recipe: str
) -> None:
    alone = train(World(), recipe, [*STEPS, "--batch_size", "64", "--out", str(tmp_path / "a")])
    flags = [*STEPS, "--batch_size", str(micro), "--out", str(tmp_path / "b")]
    other = train(World(), recipe, flags) if world == 1 else ranks(world)(train, recipe, flags)[0]
    assert apart(alone, other) < 1e-9


def batch_norm_off(world: World, flags: list[str]) -> bool:
    train(world, "WithBatchNorm", flags)
    return True


def test_batch_norm_of_each_ranks_own_trains_too(ranks, tmp_path: Path) -> None:
    assert all(ranks(2)(batch_norm_off, ["--n_steps", "6", "--sync_bn", "off", "--out", str(tmp_path / "run")]))


@pytest.mark.slow
def test_float32_loss_curves_agree(ranks, tmp_path: Path) -> None:
    flags = [*STEPS, "--precision", "fp32", "--batch_size", "64"]
    train(World(), "Tiny", [*flags, "--out", str(tmp_path / "1")])
    ranks(3)(train, "Tiny", [*flags, "--out", str(tmp_path / "3")])
    curves = [[x["loss"] for x in lines(tmp_path / world) if "loss" in x] for world in ("1", "3")]
    assert len(curves[0]) == 50 and curves[1] == pytest.approx(curves[0], rel=1e-4)


def normalised(world: World, sizes: list[int], dtype: torch.dtype, momentum: float | None) -> list[Tensor]:
    """Outputs, gradients and running statistics of a shared BatchNorm, for ranks with `sizes` samples."""
    torch.manual_seed(5)
    x = torch.randn(sum(sizes), 4, 3, dtype=dtype) * 3 + 50
    target = torch.randn(sum(sizes), 4, 3, dtype=dtype)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.rand(4))
    replace_batch_norm(model, SyncBatchNorm)
    assert isinstance(model[0], SyncBatchNorm)
    start = sum(sizes[: world.rank])
    mine = x[start : start + sizes[world.rank]].clone().requires_grad_()
    for _ in range(2):
        mine.grad = model[0].weight.grad = None
        y = model(mine)
        ((y - target[start : start + sizes[world.rank]]) ** 2).sum().backward()
    grads = [model[0].weight.grad, model[0].bias.grad]
    return [y.detach(), mine.grad, *grads, model[0].running_mean, model[0].running_var, model[0].num_batches_tracked]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_shared_batch_norm_equals_one_process(ranks, momentum: float | None) -> None:
    sizes = [5, 2, 9]
    parts = ranks(3)(normalised, sizes, torch.float64, momentum)
    torch.manual_seed(5)
    x = (torch.randn(16, 4, 3, dtype=torch.float64) * 3 + 50).requires_grad_()
    target = torch.randn(16, 4, 3, dtype=torch.float64)
    norm = nn.BatchNorm1d(4, momentum=momentum).double()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(4))
    for _ in range(2):
        x.grad = norm.weight.grad = norm.bias.grad = None
        y = norm(x)
        ((y - target) ** 2).sum().backward()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), x.grad, **close)
    torch.testing.assert_close(sum(part[2] for part in parts), norm.weight.grad, **close)
    for part in parts:
        torch.testing.assert_close(part[4], norm.running_mean, **close)
        torch.testing.assert_close(part[5], norm.running_var, **close)
        assert part[6] == norm.num_batches_tracked


def penalised(world: World, sizes: list[int]) -> Tensor:
    """The gradient of a gradient penalty through a shared BatchNorm, with respect to this rank's samples."""
    torch.manual_seed(3)
    x = torch.randn(sum(sizes), 4, dtype=torch.float64)
    norm = nn.Sequential(nn.BatchNorm1d(4)).double()
    replace_batch_norm(norm, SyncBatchNorm)
    start = sum(sizes[: world.rank])
    mine = (x[start : start + sizes[world.rank]] if world.size > 1 else x).clone().requires_grad_()
    (slope,) = torch.autograd.grad(norm(mine).pow(3).sum(), mine, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), mine)[0]


def test_a_gradient_penalty_goes_through_shared_batch_norm(ranks) -> None:
    sizes = [5, 2, 9]
    parts = ranks(3)(penalised, sizes)
    torch.testing.assert_close(torch.cat(parts), penalised(World(), sizes), rtol=1e-9, atol=1e-9)


def test_shared_batch_norm_alone_is_plain_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.BatchNorm2d(3))
    replace_batch_norm(model, SyncBatchNorm)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(model(x), plain(x))
    assert list(model.state_dict()) == ["0." + name for name in plain.state_dict()]
    assert torch.equal(model.eval()(x), plain.eval()(x))


def compiled_batch_norm(world: World, flags: list[str]) -> str:
    with pytest.raises(ValueError, match="synchronised over ranks is not compiled"):
        train(world, "WithBatchNorm", flags)
    return "refused"


def test_synchronised_batch_norm_is_not_compiled(ranks, tmp_path: Path) -> None:
    flags = ["--n_steps", "2", "--compile", "on", "--out", str(tmp_path / "run")]
    assert ranks(2)(compiled_batch_norm, flags) == ["refused"] * 2
