"""The audit inside a script and inside a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multi.ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.audit import assert_in_lockstep, probes, watch
from lockstep.audit.command import _remarks
from lockstep.audit.rank import Order
from lockstep.audit.trace import Recorder, Trace, read
from lockstep.distributed import World
from lockstep.watch import OutOfLockstep

PATCHED: list[tuple[Any, str]] = [
    (dist, "all_reduce"), (dist, "barrier"), (torch, "randn"), (torch, "save"), (torch.Tensor, "item"),
    (torch.autograd, "backward"), (torch.optim.Optimizer, "zero_grad"), (DataLoader, "__iter__"),
    (DistributedDataParallel, "forward"),
]  # fmt: skip


def train(through_wrapper: bool = True, epochs: int = 2) -> None:
    x = torch.arange(64.0).view(32, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            output = model(a) if through_wrapper else model.module(a)
            nn.functional.mse_loss(output, b).backward()
            optimizer.step()


def watched(world: World, through_wrapper: bool, raises: bool) -> tuple[list[str], str, bool]:
    before = [getattr(owner, name) for owner, name in PATCHED]
    message = ""
    try:
        with watch(raises=raises) as found:
            assert getattr(dist, "barrier") is not before[1]  # noqa: B009
            train(through_wrapper)
    except OutOfLockstep as error:
        message = str(error)
    same = all(getattr(owner, name) is b for (owner, name), b in zip(PATCHED, before, strict=True))
    return [f.kind.name for f in found.findings], message, same


def test_a_watched_script_that_is_sound_hears_nothing_and_is_left_as_it_was(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(watched, True, True) == [([], "", True)] * 2


@pytest.mark.slow
def test_all_ranks_hear_what_is_wrong(ranks: Callable[[int], Ranks]) -> None:
    for names, message, same in ranks(2)(watched, False, True):
        assert names == ["unsynchronised"] and "goes around DDP" in message and same
    for names, message, _ in ranks(2)(watched, False, False):
        assert names == ["unsynchronised"] and not message


def test_a_probe_that_fails_does_not_end_what_it_watches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lockstep.audit.probes.training.row_hashes", lambda batch: 1 / 0)
    recorder = Recorder(tmp_path, 0)
    patches = probes.install(recorder)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    finally:
        patches.undo()
    trace = Trace(read(tmp_path, 1, [0]))
    assert len(trace.ranks[0].steps) == 1
    (blind,) = trace.ranks[0].of("blind")
    assert blind["probe"] == "Training._inputs" and "division by zero" in blind["why"]
    assert any("Training._inputs: ZeroDivisionError" in remark for remark in _remarks(trace, Order(["train.py"], 1)))


def sound() -> None:
    dist.init_process_group("gloo")
    train()


def unsound() -> None:
    dist.init_process_group("gloo")
    train(through_wrapper=False)


@pytest.mark.slow
def test_one_line_in_a_test_proves_a_training_function() -> None:
    assert_in_lockstep(sound, nproc=2)
    with pytest.raises(AssertionError, match="unsynchronised"):
        assert_in_lockstep(unsound, nproc=2)


def test_a_function_that_other_processes_cannot_call_is_refused() -> None:
    with pytest.raises(ValueError, match="not at the top of a file"):
        assert_in_lockstep(lambda: None)
