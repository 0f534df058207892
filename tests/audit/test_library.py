"""The audit inside a script and inside a test."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multi.ranks import Ranks
from processes import environment, shims
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from lockstep.audit import assert_in_lockstep, probes, watch
from lockstep.audit.command import _notes
from lockstep.audit.events import Batch, End, Forward
from lockstep.audit.judges import judge
from lockstep.audit.model import Trace, read_ranks
from lockstep.audit.recorder import Recorder
from lockstep.audit.worker import LaunchSpec
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


def test_a_correct_script_has_no_findings_and_torch_is_restored(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(watched, True, True) == [([], "", True)] * 2


@pytest.mark.slow
def test_all_ranks_have_the_findings(ranks: Callable[[int], Ranks]) -> None:
    for names, message, same in ranks(2)(watched, False, True):
        assert names == ["unsynchronised"] and "goes around DDP" in message and same
    for names, message, _ in ranks(2)(watched, False, False):
        assert names == ["unsynchronised"] and not message


FAILING = {
    "training.sample_hashes": "Training._inputs",
    "context.checksums": "Training._checksums",
    "data.sample_hashes": "Data._add_hashes",
}


@pytest.mark.parametrize("function", FAILING)
def test_a_probe_that_fails_does_not_end_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
) -> None:
    monkeypatch.setattr(f"lockstep.audit.probes.{function}", lambda *_, **__: 1 / 0)
    recorder = Recorder(tmp_path, 0)
    patches = probes.install(recorder)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(3, 2)), 3):
            model(x).sum().backward()
        optimizer.step()
        recorder.write(End(0))
    finally:
        patches.undo()
    trace = Trace(read_ranks(tmp_path, 1, [0]))
    (step,) = trace.ranks[0].steps
    assert step.backwards == 1 and len(trace.ranks[0].of(Batch)) == 1
    assert trace.failed_probes == [f"{FAILING[function]}: ZeroDivisionError: division by zero"]
    assert any(trace.failed_probes[0] in note for note in _notes(trace, LaunchSpec(["train.py"], 1)))
    assert "no-steps" not in {f.kind.name for f in judge(trace)}


def test_watch_warns_of_a_probe_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.audit.probes.training.sample_hashes", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match=r"a probe failed.*Training._inputs"), watch(raises=False):
        model = nn.Linear(2, 1)
        torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(OutOfLockstep, match="no-steps"), watch() as watched:  # errors come before warnings
        torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 2)).sum().backward()
    assert watched.blind == ["Training._inputs: ZeroDivisionError: division by zero"]


class Thrice(Subset[Any]):
    """A Subset that is longer than its indices."""

    def __len__(self) -> int:
        return 3 * len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index % len(self.indices)]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_a_batch_without_known_indices_is_still_delivered() -> None:
    with pytest.warns(UserWarning, match=r"Data._index: IndexError"), watch(raises=False):
        assert len(list(DataLoader(Thrice(TensorDataset(torch.ones(4)), [0, 1]), 2))) == 3


class NoRate(torch.optim.SGD):
    """One that sets its own learning rate, and has None in its group."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, 0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad


def unusual() -> None:
    """Valid uses of PyTorch that probes cannot examine in the usual way."""
    model, table = nn.Linear(2, 1), nn.Embedding(5, 2, sparse=True)
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).sum()), in_dims=(None, 0))
    through = torch.func.vmap(lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)))
    optimizer = NoRate([*model.parameters(), *table.parameters()])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        per_sample(torch.ones(2), torch.ones(3, 2))
        noise = torch.func.vmap(lambda x: x + torch.randn_like(x), randomness="different")(torch.ones(3, 9))
        loss = through(table(torch.tensor([1, 2]))).sum() + torch.randn(16, device="meta").numel() + noise.sum() * 0
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
        optimizer.step()


def test_unusual_calls_cause_no_finding_and_no_failure() -> None:
    with watch(raises=False) as watched:
        unusual()
    assert [f.kind.name for f in watched.findings] == [] and watched.blind == []


def test_a_step_that_only_creates_the_optimizer_state_is_not_counted() -> None:
    with watch(raises=False) as watched:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        get_optimizer_state_dict(model, optimizer)  # takes a step with rate 0
        assert optimizer.state
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert [f.kind.name for f in watched.findings] == []


def test_what_a_script_loads_is_what_it_saved(tmp_path: Path) -> None:
    """A tensor, a checkpoint, and one that is saved again."""
    saved = {"epoch": 3, "model": {"w": torch.ones(2)}}
    with watch(raises=False):
        torch.save(torch.ones(4), tmp_path / "tensor.pt")
        torch.save(saved, tmp_path / "a.pt")
        assert torch.equal(torch.load(tmp_path / "tensor.pt"), torch.ones(4))
        loaded = torch.load(tmp_path / "a.pt")
        assert type(loaded) is dict and loaded["epoch"] == 3
        torch.save(loaded, tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["epoch"] == 3


def test_a_loader_without_workers_leaves_the_start_method_open() -> None:
    code = "import torch; from torch.utils.data import DataLoader; from lockstep.audit import watch\n"
    code += "with watch(raises=False):\n    list(DataLoader([1, 2]))\n"
    code += "    torch.multiprocessing.set_start_method('spawn')"
    assert subprocess.run(["python", "-c", code], env=environment(), check=False).returncode == 0


def sharded(world: World, folder: Path) -> list[tuple[bool, bool]]:
    patches = probes.install(Recorder(folder, world.rank))
    try:
        from torch.distributed.fsdp import fully_shard  # as in a script, whose first line comes after the probes

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        for module in (*model, model):
            fully_shard(module)
        model(torch.ones(3, 4)).sum().backward()
        for wrong in (torch.ones(3, 5), "fails in a hook, before the pass begins"):
            with pytest.raises((RuntimeError, AttributeError)):
                model(wrong)
        model(torch.ones(3, 4))
    finally:
        patches.undo()
    mine = read_ranks(folder, world.size, [0] * world.size)[world.rank]
    forwards = [call for call in mine.calls if isinstance(call.event, Forward)]
    return [(call.end is not None, call.event.training) for call in forwards]


def test_the_forward_pass_of_fsdp_is_recorded_once_also_after_a_failed_one(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    assert ranks(2)(sharded, tmp_path) == [[(True, True)] * 4] * 2


def correct() -> None:
    dist.init_process_group("gloo")
    train()


def buggy() -> None:
    dist.init_process_group("gloo")
    train(through_wrapper=False)


@pytest.mark.slow
def test_assert_in_lockstep_fails_for_a_buggy_function_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(shims() / "python"))
    assert_in_lockstep(correct, nproc=2)
    with pytest.raises(AssertionError, match="unsynchronised"):
        assert_in_lockstep(buggy, nproc=2)


def test_a_function_that_other_processes_cannot_call_raises() -> None:
    with pytest.raises(ValueError, match="define it at the top level of a file"):
        assert_in_lockstep(lambda: None)
