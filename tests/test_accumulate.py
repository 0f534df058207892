"""Steps of a loop of one's own that are given a loss as a function: made again where necessary, exact on request."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import SET, Counting
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed import World


def two_losses(world: World, refused: int | None, *, by_hand: bool = False, **settings: Any) -> list[Tensor]:
    """Weights after steps with two losses of a net.

    `refused`: the call of a loss that is out of memory. `by_hand`: with `backward` in place of `accumulate`.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run, calls = lockstep.Run(world, model=net, optimizer=optimizer, **settings), iter(range(1000))

    def fit(batch: list[Tensor]) -> tuple[Tensor, int]:
        if next(calls) == refused:
            raise torch.OutOfMemoryError("simulated")
        return (net(batch[0]) - 1).square().sum(), len(batch[0])

    def size(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        found = net(batch[0]).abs()
        return found.sum(), torch.tensor(found.numel() * 2.0)

    points = TensorDataset(torch.linspace(-1, 1, 24).view(12, 2))
    for step in run.steps(points, 6, batch_size=4, n_steps=4):
        if by_hand:
            for batch in step:
                run.backward(*fit(batch), name="fit")
                run.backward(*size(batch), name="size")
        else:
            run.accumulate(step, fit, "fit")
            run.accumulate(step, size, "size")
        optimizer.step()
        optimizer.zero_grad()
    assert run.means().keys() == {"fit", "size"}
    run.close()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("exact", [False, True])
def test_accumulate_makes_the_gradients_of_backward_also_after_being_out_of_memory(exact: bool) -> None:
    expected = two_losses(World(), None, by_hand=True)
    for refused in (None, 0, 5):
        for found, right in zip(two_losses(World(), refused, exact=exact), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


class Counted(nn.Module):
    """A layer that counts its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.linear(x)


def test_a_step_that_is_made_again_uses_each_item_of_a_sequence_once_and_puts_buffers_back() -> None:
    model, items = Counted(), list[list[int]]()
    run = lockstep.Run(World(), model=model)

    def loss(batch: Tensor) -> tuple[Tensor, int]:
        total = model(batch.float()[:, None]).sum()
        items[-1] += batch.tolist()
        if run.step == 1 and batch[0] == 12 and len(batch) == 4:
            items[-1].clear()
            raise torch.OutOfMemoryError("simulated")
        return total, len(batch)

    for step in run.steps(Counting(20), 8, batch_size=4, n_steps=3):
        items.append([])
        run.accumulate(step, loss)
    assert items == [[n % 20 for n in range(first, first + 8)] for first in (0, 8, 16)]
    assert model.seen == 24


def test_out_of_memory_with_a_single_sample_ends_the_run() -> None:
    model = nn.Linear(1, 1)

    def loss(_: Any) -> tuple[Tensor, int]:
        raise torch.OutOfMemoryError("simulated")

    run = lockstep.Run(World(), model=model)
    with pytest.raises(lockstep.RunFailed, match="not enough memory for a single sample"):
        for step in run.steps(SET, 8, n_steps=1):
            run.accumulate(step, loss)


def test_what_an_exact_loop_cannot_do_is_refused() -> None:
    norm, double, linear = nn.BatchNorm1d(1), nn.Linear(1, 1).double(), nn.Linear(1, 1)
    for model, said in ((norm, "BatchNorm"), (double, "float64"), (torch.compile(linear), "compiled")):
        with pytest.raises(ValueError, match=f"exact=True: model.*{said}"):
            lockstep.Run(World(), exact=True, model=model)
    model, counter = nn.Linear(1, 1), nn.Module()
    counter.register_buffer("seen", torch.zeros(()))
    run = lockstep.Run(World(), exact=True, model=model, counter=counter)

    def counting(batch: list[Tensor]) -> tuple[Tensor, int]:
        counter.seen += 1
        return model(batch[0][:, None]).sum(), len(batch[0])

    step = next(run.steps(SET, 8, n_steps=1))
    with pytest.raises(ValueError, match=r"not run\.backward"):
        run.backward(model(torch.ones(1, 1)).sum(), 1)
    with pytest.raises(ValueError, match=r"changes the buffer counter\.seen"):
        run.accumulate(step, counting)
    with pytest.raises(ValueError, match=r"returns \(total, weight\)"):
        run.accumulate(step, lambda batch: batch[0].sum())
    run.close()
    with pytest.raises(ValueError, match="leave out the loop over its batches"):
        run = lockstep.Run(World(), model=model)
        for step in run.steps(SET, 8, batch_size=4, n_steps=1):
            next(step)
            run.accumulate(step, counting)


def test_a_run_that_was_not_exact_from_its_first_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for exact in (False, True, False):
        model = nn.Linear(1, 1)
        run = lockstep.Run(World(), tmp_path, exact=exact, model=model)
        for step in run.steps(SET, 8, batch_size=4, n_steps=run.step + 1):
            run.accumulate(step, lambda batch, model=model: (model(batch[0][:, None]).sum(), len(batch[0])))
        run.close()
        said.append(capsys.readouterr().err)
    assert "the steps up to 1 were not exact" in said[1]
    assert "the run was exact up to its last checkpoint, and no longer is: give exact=True" in said[2]
