"""Loops of one's own, on one rank and on many: the examples end alike, however often they are interrupted."""

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import NAMES, final_state, run_example
from processes import ROOT, environment
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import IterableDataset, TensorDataset
from torchmetrics.functional.classification import binary_auroc

from lockstep import OutOfLockstep, Run
from lockstep.audit.launcher import free_port
from lockstep.distributed import World
from lockstep.gradient_sums import Bucket
from multi.ranks import Ranks

pytestmark = pytest.mark.slow

Get = Callable[[int], Ranks]
Whole = tuple[str, Path, list[str]]
KILLED_AT = {"classifier": 20, "gan": 31, "language_model": 33, "self_supervised": 20}
"""In the middle between two checkpoints."""


def assert_same_end(one: Path, other: Path, name: str, bits: bool = False) -> None:
    """Models and optimizers, to the bit or up to the rounding of float64; and whatever else was saved."""
    (tensors, state), (others, other_state) = final_state(one, name), final_state(other, name)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        distance = (tensor.double() - others[key].double()).norm().item()
        assert distance <= (0 if bits else 1e-12 + 1e-8 * tensor.double().norm().item()), key
    assert {**state, "objects": None} == {**other_state, "objects": None}


@pytest.fixture(scope="module", params=NAMES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An example, where it ran on one rank without a stop, and its metrics."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, run_example(World(), request.param, str(folder))


def test_one_rank_and_many_end_alike(whole: Whole, tmp_path: Path, ranks: Get) -> None:
    """On three ranks, whose parts of a batch differ in size; the next test has two."""
    name, expected, metrics = whole
    assert ranks(3)(run_example, name, str(tmp_path)) == [metrics] * 3
    assert_same_end(expected, tmp_path, name)


def test_killed_and_resumed_it_ends_the_same(whole: Whole, tmp_path: Path, ranks: Get) -> None:
    """To the bit where it goes on with as many ranks; up to rounding with another number of them."""
    (name, expected, _), again, wider = whole, tmp_path / "again", tmp_path / "wider"
    again.mkdir()
    command = ["python", str(ROOT / "tests" / "loops.py"), name, str(KILLED_AT[name])]
    done = subprocess.run(command, cwd=again, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert final_state(again, name)[1]["step"] < KILLED_AT[name]
    shutil.copytree(again, wider)
    run_example(World(), name, str(again))
    assert_same_end(expected, again, name, bits=True)
    ranks(2)(run_example, name, str(wider))
    assert_same_end(expected, wider, name)


def test_a_killed_rank_ends_the_others_and_torchrun_resumes_the_same_bits(tmp_path: Path, ranks: Get) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    whole.mkdir()
    again.mkdir()
    ranks(2)(run_example, "self_supervised", str(whole))
    command = ["torchrun", "--nproc_per_node=2", f"--master_port={free_port()}", str(ROOT / "tests" / "loops.py")]
    for step, status in ((20, 1), (-1, 0)):
        words = [*command, "self_supervised", str(step)]
        done = subprocess.run(words, cwd=again, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert_same_end(whole, again, "self_supervised", bits=True)


def heads(world: World) -> dict[str, Tensor | None]:
    """Gradients of a model of which each rank uses another part, and nobody the last."""
    torch.manual_seed(world.rank)  # the weights of rank 0 count
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("0", "1", "unused")}).double()
    run = Run(world, model=model)
    for (x,) in run.batches(TensorDataset(torch.arange(14.0).double().view(7, 2)), 7, n_steps=1):
        run.backward(model[str(world.rank)](x).sum(), weight=len(x))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_parameters_that_only_some_ranks_use_get_the_sum_and_unused_ones_none(ranks: Get) -> None:
    first, second = ranks(2)(heads)
    assert first["unused.weight"] is None is second["unused.weight"]
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(first[name], second[name]), name
    assert first["0.bias"] + first["1.bias"] == 1  # each is the rank's part of the samples
    assert (first["0.weight"] + first["1.weight"]).flatten().tolist() == pytest.approx([6, 7])


def sent(world: World, reentrant: bool) -> tuple[list[bool], list[Tensor]]:
    """Whether each bucket was sent while backward was running, and the gradients; a layer is used twice."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
    Bucket.BYTES, bytes_before = 80, Bucket.BYTES
    early, send = list[bool](), Bucket.send
    run = Run(world, model=model)

    def recorded(bucket: Bucket, integers: bool = False) -> None:
        early.append(run.gradients.sums._running)
        send(bucket, integers)

    Bucket.send = recorded  # type: ignore[method-assign]
    try:
        for (x,) in run.batches(TensorDataset(torch.arange(21.0).double().view(7, 3)), 7, n_steps=1):
            seen = x.requires_grad_()
            for layer in (*model, model[2]):
                seen = checkpointed(layer, seen, use_reentrant=reentrant)
            run.backward(seen.square().sum(), weight=len(x))
    finally:
        Bucket.BYTES, Bucket.send = bytes_before, send  # type: ignore[method-assign]
    return early, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_sent_while_backward_is_running(ranks: Get) -> None:
    _, expected = sent(World(), False)
    for early, gradients in ranks(3)(sent, False):
        assert len(early) >= 4 and all(early)
        for gradient, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, right)


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error_and_never_lost(ranks: Get) -> None:
    with pytest.raises(AssertionError, match="use_reentrant=False"):
        ranks(2)(sent, True)


class Counter:
    """A registered object that is not the same on each rank."""

    def __init__(self, n: int):
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class OwnPart(IterableDataset[Tensor]):
    """An iterable data set that splits itself over the ranks, as many do."""

    def __init__(self, world: World):
        self.world = world

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(100)[self.world.rank :: self.world.size])


def differences(world: World) -> list[str]:
    """What is said when the ranks differ in a weight, in a number, in their data."""
    model = nn.Linear(1, 1)
    attempts = (Run(world, model=model).check, Run(world, counter=Counter(world.rank)).save)
    model.weight.data += world.rank
    found = []
    for attempt in (*attempts, lambda: next(Run(world).batches(OwnPart(world), 8, n_steps=1))):
        try:
            attempt()
        except OutOfLockstep as error:
            found.append(str(error))
    return found


def test_ranks_that_differ_are_told_so(ranks: Get) -> None:
    for weight, number, data in ranks(2)(differences):
        assert "at step 0 the ranks no longer hold the same tensors: 1 differ, first model/weight" in weight
        assert number == "at step 0 the state.counter.n is 0 on rank 0 but 1 on rank 1"
        assert "sample 0 of train is not the same on rank 0 and rank 1" in data


def agreed(world: World) -> tuple[list[int], bool, bool]:
    rows = world.gather_rows(torch.arange(world.rank + 1) + 10 * world.rank)
    return rows.tolist(), world.any(world.rank == 2), world.any(False)


def test_rows_of_all_ranks_come_in_order_and_a_flag_of_one_counts(ranks: Get) -> None:
    assert ranks(3)(agreed) == [([0, 10, 11, 20, 21, 22], True, False)] * 3


def area_under_the_curve(world: World) -> float:
    """AUROC over a set that the ranks share unevenly, as the page on loops computes it."""
    generator = torch.Generator().manual_seed(1)
    test_set = TensorDataset(torch.randn(53, 1, generator=generator), torch.arange(53) % 2)
    run, scores, labels = Run(world), list[Tensor](), list[Tensor]()
    for x, y in run.shard(test_set, 8):
        scores.append(x.sigmoid().flatten())
        labels.append(y)
    rows = (world.gather_rows(torch.cat(rows)) for rows in (scores, labels))
    return float(binary_auroc(*rows))


def test_a_metric_that_does_not_add_up_is_the_same_on_any_number_of_ranks(ranks: Get) -> None:
    expected = area_under_the_curve(World())
    assert 0.2 < expected < 0.8 and ranks(3)(area_under_the_curve) == [expected] * 3


def accumulated(world: World, folder: str, batch_size: int) -> Tensor:
    """Weights after steps of uneven micro-batches with masks, over an iterable data set."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run = Run(world, folder, model=model, optimizer=optimizer)
    for step in run.steps(Counting(), 11, batch_size=batch_size, n_steps=6):
        for x in step:
            kept = x[x % 3 > 0].double()
            run.backward(model(kept[:, None]).square().sum(), weight=torch.tensor(len(kept)))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return model.weight.detach()


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(25))


def test_micro_batches_of_any_size_on_any_world_make_the_same_steps(tmp_path: Path, ranks: Get) -> None:
    whole = accumulated(World(), str(tmp_path / "whole"), 11)
    for size, batch_size in ((2, 2), (3, 3), (3, 1)):
        for weight in ranks(size)(accumulated, str(tmp_path / f"{size}-{batch_size}"), batch_size):
            torch.testing.assert_close(weight, whole, rtol=1e-12, atol=0)


SCRIPT = """
import os, signal, sys, threading, torch, lockstep
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import TensorDataset

with lockstep.world(device="cpu", hang_timeout=3 if sys.argv[1] == "hang" else 300) as world:
    model = torch.nn.Linear(1, 1)
    run = lockstep.Run(world, "run", model=model)
    for (x,) in run.batches(TensorDataset(torch.arange(20.0)), 8 if sys.argv[1] != "small" else 1, n_steps=5):
        run.backward(model(x[:, None]).sum(), weight=len(x))
        if run.step == 3 and world.rank == 1:
            if sys.argv[1] == "error":
                int("x")
            if sys.argv[1] == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if sys.argv[1] == "hang":
                threading.Event().wait()
"""


def torchrun(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = ["torchrun", "--nproc_per_node=2", f"--master_port={free_port()}", "script.py", what]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_a_failure_is_printed_once_and_a_signal_saves_on_all_ranks(tmp_path: Path) -> None:
    found = {}
    for what in ("small", "error", "signal", "rest"):
        done = torchrun(what, tmp_path)
        found[what], _, summary = done.stderr.partition("torch/distributed/elastic")
        assert (done.returncode == 0) == (what == "rest"), done.stderr
        assert ("lockstep: " in summary) == (what in ("small", "error"))  # torchrun's own shows the cause too
    assert found["small"].count("lockstep: a global batch of 1 is too small for 2 ranks; start fewer") == 1
    assert "script.py" not in found["small"]  # no traceback of the script
    assert found["error"].count("ValueError: invalid literal") == 2 and found["error"].count('int("x")') == 1
    assert "lockstep: rank 1: ValueError: invalid literal" in found["error"]
    assert "lockstep: stopped by SIGTERM after step 4; everything is saved in run" in found["signal"]
    assert "lockstep: resumed run after step 4" in found["rest"]


def test_a_hang_is_reported_with_the_line_that_is_stuck(tmp_path: Path) -> None:
    done = torchrun("hang", tmp_path)
    assert "rank 1 is stuck in step 4" in done.stderr and "threading.Event().wait()" in done.stderr, done.stderr
    assert (tmp_path / "run" / "hang.txt").exists()


def exactly(world: World, folder: str, n_steps: int, spoil: str = "", exact: bool = True) -> tuple[list[bytes], Any]:
    """The bits of all weights and the mean losses after steps over 13 samples in 5 tiles, with dropout; what spoils it:
    `memory` (the last rank is out of it in the third step), `spike` (the fifth step has far larger gradients).
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run = Run(world, folder, exact=exact, save_every=100, model=model, optimizer=optimizer)
    calls, refused = list[int](), set[int]()

    def loss(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(len(batch[0]))
        if spoil == "memory" and run.step == 2 and world.rank == world.size - 1 and 2 not in refused:
            refused.add(2)
            raise torch.OutOfMemoryError("simulated")
        scale = 1e4 if spoil == "spike" and run.step == 4 else 1.0
        kept = batch[0][batch[0][:, 0] > -1]
        return (model(kept).squeeze(1) - kept.sum(1)).square().sum() * scale, torch.tensor(len(kept))

    for step in run.steps(TensorDataset(inputs), 13, batch_size=3, n_steps=n_steps):
        run.accumulate(step, loss)
        optimizer.step()
        optimizer.zero_grad()
    means = run.means()
    run.close()
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    return [p.detach().numpy().tobytes() for p in model.parameters()], (means, sum(calls), max(calls[-3:]))


@pytest.mark.parametrize("spoil", ["", "spike"])
def test_exact_sums_make_the_same_bits_on_any_number_of_ranks(tmp_path: Path, ranks: Get, spoil: str) -> None:
    """A step whose gradients do not fit their grid is done again, on each of them."""
    expected, (means, samples, _) = exactly(World(), str(tmp_path / "1"), 6, spoil)
    for size in (2, 3):
        answers = ranks(size)(exactly, str(tmp_path / str(size)), 6, spoil)
        assert [weights for weights, _ in answers] == [expected] * size
        assert [found for _, (found, *_) in answers] == [means] * size
        assert sum(count for _, (_, count, _) in answers) == samples
    assert samples == 13 * (6 + 1 + (spoil == "spike"))  # the first step is measured before it is made


def test_an_exact_loop_is_resumed_on_other_numbers_of_ranks_with_the_same_bits(tmp_path: Path, ranks: Get) -> None:
    expected, _ = exactly(World(), str(tmp_path / "whole"), 9)
    ranks(2)(exactly, str(tmp_path / "again"), 3)
    exactly(World(), str(tmp_path / "again"), 6)
    answers = ranks(3)(exactly, str(tmp_path / "again"), 9)
    assert [weights for weights, _ in answers] == [expected] * 3
    rounded, _ = exactly(World(), str(tmp_path / "rounded"), 9, exact=False)
    assert rounded != expected


@pytest.mark.parametrize("exact", [True, False])
def test_out_of_memory_on_one_rank_makes_micro_batches_smaller_on_all(tmp_path: Path, ranks: Get, exact: bool) -> None:
    """Exact: with the same bits on any number of ranks again, and in smaller tiles also when it is resumed."""
    expected, _ = exactly(World(), str(tmp_path / "1"), 6, "memory", exact)
    for size in (2, 3):
        answers = ranks(size)(exactly, str(tmp_path / str(size)), 6, "memory", exact)
        assert max(largest for _, (_, _, largest) in answers) == 2  # was 3
        assert all(weights == answers[0][0] for weights, _ in answers)
        assert not exact or answers[0][0] == expected
    if exact:
        further = [exactly(World(), str(tmp_path / folder), 8) for folder in ("1", "3")]
        assert further[0][0] == further[1][0] and further[0][1][2] == 2


def documented(world: World, folder: str) -> None:
    """Run the example of the page on loops, in a folder."""
    page = (ROOT / "docs" / "your-own-loop.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*exact=True[^`]*)```", page)
    script: dict[str, Any] = {"__name__": "example"}
    exec(code, script)
    with contextlib.chdir(folder):
        script["main"](world)
        world.closing.close()


def test_the_documented_exact_loop_ends_with_the_same_bits(tmp_path: Path, ranks: Get) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    documented(World(), str(one))
    ranks(2)(documented, str(two))
    assert_same_end(one, two, "exact", bits=True)
