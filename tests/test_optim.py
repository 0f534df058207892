"""Learning rates and averages, against their formulas."""

import math

import pytest
import torch
from torch import nn

from lockstep.batching import Batching
from lockstep.config import Optim
from lockstep.optim import Ema, Schedule, scaled_lr

SIZES = Batching(dataset=1000, micro_batch=10, accumulation=1, world=1, global_batch=10, n_steps=110)


def curve(**settings) -> list[float]:
    schedule = Schedule(Optim(lr=0.5, **settings), SIZES)
    return [schedule(step) for step in range(SIZES.n_steps)]


def test_warm_up_rises_linearly_from_zero_for_every_schedule() -> None:
    for kind in ("constant", "cosine", "linear", "step"):
        start = curve(schedule=kind, warmup_steps=10)[:11]
        assert start[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
        assert start[10] == pytest.approx(1.0)


def test_warm_up_in_epochs_counts_global_batches() -> None:
    assert Schedule(Optim(warmup_epochs=0.1, warmup_steps=3), SIZES).warmup == 13


def test_constant_cosine_linear_step() -> None:
    assert set(curve(schedule="constant")) == {1.0}
    cosine = curve(schedule="cosine", min_lr=0.05)
    assert cosine[0] == 1 and cosine[55] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1, abs=1e-3)
    assert curve(schedule="linear")[55] == pytest.approx(0.5)
    step = curve(schedule="step", decay_steps=50, decay_factor=0.1)
    assert [step[0], step[49], step[50], step[100]] == pytest.approx([1, 1, 0.1, 0.01])


def test_lr_follows_the_global_batch() -> None:
    assert scaled_lr(Optim(lr=0.1), 1024) == 0.1
    assert scaled_lr(Optim(lr=0.1, lr_scaling="linear", base_batch_size=256), 1024) == pytest.approx(0.4)
    assert scaled_lr(Optim(lr=0.1, lr_scaling="sqrt", base_batch_size=256), 1024) == pytest.approx(0.2)
    assert scaled_lr(Optim(lr=0.1, lr_scaling="linear", base_batch_size=16), 16) == pytest.approx(0.1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)


def test_ema_follows_its_formula_and_counts_buffers() -> None:
    model = Tied()
    ema = Ema(model, 0.9)
    expected = model.a.weight.detach().clone()
    for n in range(200):
        with torch.no_grad():
            model.a.weight.add_(torch.randn(4, 4))
            model.norm.num_batches_tracked += 1
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.a.weight.detach()
        ema.update(n)
    torch.testing.assert_close(ema.shadow["a.weight"], expected)
    assert ema.shadow["norm.num_batches_tracked"] == 200


def test_averaged_weights_come_and_go_also_for_tied_ones() -> None:
    model = Tied()
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.a.weight.fill_(3.0)
    average = ema.shadow["a.weight"].clone()
    for _ in range(2):
        with ema.applied():
            assert torch.equal(model.a.weight, average) and torch.equal(model.b.weight, average)
        assert (model.a.weight == 3).all() and torch.equal(ema.shadow["b.weight"], average)


def test_ema_starts_at_the_weights_themselves() -> None:
    model = nn.Linear(2, 2)
    assert math.isclose(Ema(model, 0.999).shadow["weight"].sum().item(), model.weight.sum().item())
