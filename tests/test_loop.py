"""The pieces of a loop of one's own, on one rank: data, gradients, checkpoints, signals, and what is refused."""

import difflib
import inspect
import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from loops import FOLDER, NAMES
from processes import ROOT
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep import checkpoint, nested
from lockstep.distributed import World

SET = TensorDataset(torch.arange(20.0))


class Counting(IterableDataset[Tensor]):
    """The numbers below `size`, as items of a sequence."""

    def __init__(self, size: int):
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.size))


def numbers(world: World, dataset: Any, folder: Path | None = None, **length: int) -> list[list[int]]:
    run = lockstep.Run(world, folder)
    batches = [batch[0] if isinstance(batch, list) else batch for batch in run.batches(dataset, 8, **length)]
    run.close()
    return [batch.int().tolist() for batch in batches]


def test_each_sample_comes_once_per_epoch_in_an_order_that_changes() -> None:
    seen = [*chain(*numbers(World(), SET, n_steps=5))]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20)) and seen[:20] != seen[20:]
    assert len(numbers(World(), SET, epochs=3)) == 8  # 60 samples, 8 at a time: the last batch ends in the next epoch


def test_an_iterable_set_is_read_in_order_across_epochs_and_from_where_it_was(tmp_path: Path) -> None:
    batches = numbers(World(), Counting(11), n_steps=4)
    assert [*chain(*batches)] == [n % 11 for n in range(32)]
    first = numbers(World(), Counting(11), tmp_path, n_steps=3)
    assert first + numbers(World(), Counting(11), tmp_path, n_steps=4) == batches


def test_an_iterable_set_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    numbers(World(), Counting(30), tmp_path, n_steps=3)
    with pytest.raises(ValueError, match="epoch 0 of the iterable data set has 5 item"):
        numbers(World(), Counting(5), tmp_path, n_steps=4)


def test_items_are_augmented_with_their_own_randomness_and_the_rng_is_that_of_the_samples() -> None:
    run = lockstep.Run(World(), seed=3)
    for augmented in run.batches(Counting(6), 6, n_steps=1, augment=lambda item, rng: (item, rng.uniform("a")[0])):
        item, drawn = augmented
        assert torch.equal(run.rng.uniform("a"), drawn)
        assert torch.equal(drawn, lockstep.Rng.of(3, torch.zeros(6, dtype=torch.int64), item).uniform("a"))
    with pytest.raises(ValueError, match="inside the loop over batches"):
        run.rng.uniform("a")


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def gradient(batch_size: int | None, weighted: bool) -> Tensor:
    """Of the mean over the first global batch, in micro-batches of a size; of some samples more elements count."""
    model = model_of(1, 1)
    run = lockstep.Run(World(), model=model)
    for step in run.steps(SET, 8, batch_size=batch_size, n_steps=1):
        for (x,) in step:
            kept = x[x % 3 == 0] if weighted else x
            run.backward(model(kept[:, None]).square().sum(), weight=torch.tensor(len(kept)))
    assert model[0].weight.grad is not None
    return model[0].weight.grad


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulated_gradients_are_those_of_the_mean_over_the_global_batch(weighted: bool) -> None:
    (x,) = next(iter(lockstep.Run(World()).batches(SET, 8, n_steps=1)))
    x, model = x[x % 3 == 0] if weighted else x, model_of(1, 1)
    model(x[:, None]).square().mean().backward()
    for batch_size in (None, 3, 1):
        torch.testing.assert_close(gradient(batch_size, weighted), model[0].weight.grad)


def test_several_losses_add_to_what_grad_holds_as_in_pytorch() -> None:
    """With micro-batches too, and where a parameter takes part in one of them only."""
    model, plain = model_of(1, 1, 1), model_of(1, 1, 1)
    run = lockstep.Run(World(), model=model)
    for step in run.steps(SET, 8, batch_size=3, n_steps=1):
        seen = []
        for (x,) in step:
            seen.append(x)
            run.backward(model(x[:, None]).sum(), weight=len(x), name="one")
            run.backward(model[0](x[:, None]).square().sum(), weight=2 * len(x), name="other")
    x = torch.cat(seen)[:, None]
    (plain(x).mean() + plain[0](x).square().mean() / 2).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert run.means().keys() == {"one", "other"} and run.means() == {}


def test_a_parameter_without_a_gradient_keeps_none_and_no_elements_give_zero() -> None:
    model = model_of(1, 1, 1)
    run = lockstep.Run(World(), model=model)
    run.backward(model[0](torch.ones(2, 1)).sum() * 0, weight=0)
    assert model[0].weight.grad == 0 and model[1].weight.grad is None


def test_means_are_those_of_all_elements_since_the_last_call() -> None:
    w = nn.Parameter(torch.ones(()))
    run = lockstep.Run(World(), model=nn.ParameterList([w]))
    run.backward(6 * w, weight=2)
    run.backward(3 * w, weight=4)
    assert run.means() == {"loss": 1.5}


def train(folder: Path | None, n_steps: int, **settings: Any) -> lockstep.Run:
    model = model_of(1, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    run = lockstep.Run(World(), folder, model=model, optimizer=optimizer, schedule=schedule, **settings)
    for (x,) in run.batches(SET, 8, n_steps=n_steps):
        run.backward(model(x[:, None]).square().sum(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    run.close()
    return run


def weights(run: lockstep.Run) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.registered.models["model"].state_dict().items()}


def test_a_run_goes_on_where_it_was_with_everything_that_is_registered(tmp_path: Path) -> None:
    whole = train(None, 9)
    train(tmp_path, 4)
    resumed = train(tmp_path, 9)
    assert resumed.step == 9 and weights(resumed).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    saved = checkpoint.load(tmp_path / "checkpoints" / "last")
    assert saved.state["objects"]["schedule"]["last_epoch"] == 9 and saved.state["feed"]["ledger"]["complete"] == 3
    assert train(tmp_path, 9).step == 9  # nothing left to do


def test_a_loop_that_is_left_by_break_has_counted_its_last_step(tmp_path: Path) -> None:
    model = model_of(1, 1)
    run = lockstep.Run(World(), tmp_path, model=model)
    for (x,) in run.batches(SET, 8, n_steps=9):
        run.backward(model(x[:, None]).sum(), weight=len(x))
        if run.step == 2:
            break
    run.save(wait=True)
    assert run.step == 3 and (tmp_path / "checkpoints" / "step-00000003").exists()


def test_a_signal_saves_after_the_step_and_ends_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, handler = model_of(1, 1), signal.getsignal(signal.SIGTERM)
    run = lockstep.Run(World(), tmp_path, model=model)
    with pytest.raises(lockstep.Stopped) as stopped:
        for (x,) in run.batches(SET, 8, n_steps=9):
            run.backward(model(x[:, None]).sum(), weight=len(x))
            if run.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 75 and stopped.value.by == signal.SIGTERM
    assert f"stopped by SIGTERM after step 4; everything is saved in {tmp_path}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_loader_of_ones_own_needs_end_step_only(tmp_path: Path) -> None:
    model = model_of(1, 1)
    run = lockstep.Run(World(), tmp_path, model=model, save_every=2)
    for _ in range(5):
        run.backward(model(torch.ones(3, 1)).sum(), weight=3)
        run.end_step()
    run.close()
    assert checkpoint.newest(tmp_path / "checkpoints", print).step == 4  # type: ignore[union-attr]


def test_a_shard_has_each_sample_once() -> None:
    parts = [list(lockstep.Run(World(rank, 3)).shard(range(10), 2)) for rank in range(3)]
    assert [torch.cat(part).tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("wrong", [
    (lambda: lockstep.Run(World(), save_every=0), "save_every is at least 1 step, not 0"),
    (lambda: lockstep.Run(World()).backward(torch.ones((), requires_grad=True), 1), "and there is none"),
    (lambda: lockstep.Run(World(), adam=torch.optim.Adam(model_of(1, 1).parameters())), "2 parameter.s. that are"),
    (lambda: lockstep.Run(World(), model=3), "model is a int, which has no state_dict"),
    (lambda: next(lockstep.Run(World()).batches(SET, 8)), "n_steps or epochs, one of the two"),
    (lambda: next(lockstep.Run(World()).batches(Counting(9), 8, epochs=1)), "no known length"),
    (lambda: next(lockstep.Run(World()).batches(iter(range(9)), 8, n_steps=1)), "range_iterator can be read only once"),
    (lambda: next(lockstep.Run(World()).batches(Counting(0), 8, n_steps=1)), "epoch 0 .* has 0 item"),
    (lambda: next(lockstep.Run(World()).batches(SET, 40, n_steps=1)), "fewer than the global batch of 40"),
    (lambda: next(lockstep.Run(World()).shard(Counting(9))), "cannot be split over ranks exactly"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(wrong: tuple[Any, str]) -> None:
    attempt, text = wrong
    with pytest.raises(ValueError, match=text):
        attempt()


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(ValueError, match="this run began with seed 0, not 1"):
        train(tmp_path, 5, seed=1)
    with pytest.raises(ValueError, match="holds model, optimizer, schedule, but model is registered"):
        lockstep.Run(World(), tmp_path, model=model_of(1, 4, 1))
    other = model_of(1, 5, 1)
    with pytest.raises(ValueError, match=r"0.weight \(4, 1\), here \(5, 1\)"):
        lockstep.Run(World(), tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters()), schedule=other)


def test_a_folder_of_a_recipe_is_refused(tmp_path: Path) -> None:
    lockstep.fit(tiny.Plain, n_steps=2, device="cpu", out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="holds a run of a recipe"):
        lockstep.Run(World(), tmp_path / "run", model=model_of(1, 1))


def test_a_run_that_cannot_be_saved_at_its_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_fill", full)
    with pytest.raises(lockstep.NotSaved, match=r"after step 2 could not be saved: .*No space left"):
        train(tmp_path, 2)


def test_a_step_of_which_nothing_is_taken_is_refused() -> None:
    """Its samples would be those of the step after it, and so on."""
    run = lockstep.Run(World(), model=nn.Linear(2, 1))
    with pytest.raises(ValueError, match="left before its last micro-batch"):
        for _ in run.steps(SET, 4, n_steps=2):
            pass


def test_a_micro_batch_is_used_once_and_wholly() -> None:
    w = nn.Parameter(torch.ones(()))
    model = nn.ParameterList([w])
    run = lockstep.Run(World(), model=model)
    with pytest.raises(ValueError, match="twice for one micro-batch"):
        for step in run.steps(SET, 8, batch_size=4, n_steps=1):
            for _ in step:
                run.backward(w * 1, weight=1)
                run.backward(w * 2, weight=1)
    run = lockstep.Run(World())
    with pytest.raises(ValueError, match="left before its last micro-batch"):
        for step in run.steps(SET, 8, batch_size=4, n_steps=1):
            next(step)
    run = lockstep.Run(World(), model=model)
    with pytest.raises(ValueError, match="not called for the last micro-batch"):
        for step in run.steps(SET, 8, batch_size=4, n_steps=1):
            for number, _ in enumerate(step):
                if number == 0:
                    run.backward(w * 1, weight=1)


SCHEDULES = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_states_of_schedules_survive_as_they_are(make: Any) -> None:
    state = make(torch.optim.SGD(model_of(1, 1).parameters(), 0.1, 0.9)).state_dict()
    tensors, outline = nested.split(state)
    again = nested.join(tensors, json.loads(json.dumps(outline)))
    assert again == state and list(map(type, again.values())) == list(map(type, state.values()))


def test_states_of_any_shape_survive() -> None:
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), 1: (None, True, [1.5, "x"]), "$dict": {(1, 2): "t"}}
    tensors, outline = nested.split(state)
    again = nested.join(tensors, outline)
    assert torch.equal(again["a"]["b"], torch.ones(2)) and torch.equal(again["a.b"], torch.zeros(3))
    assert again[1] == state[1] and again["$dict"] == {(1, 2): "t"}
    with pytest.raises(ValueError, match=r"a.0 is a set; a checkpoint holds"):
        nested.split({"a": [{1}]})


@pytest.mark.parametrize("name", NAMES)
def test_the_guide_shows_the_true_diff_of_at_most_ten_lines(name: str) -> None:
    one, many = ((FOLDER / f"{file}.py").read_text().splitlines() for file in (f"{name}_single", name))
    diff = list(difflib.unified_diff(one, many, f"{name}_single.py", f"{name}.py", n=0, lineterm=""))
    assert "\n".join(["```diff", *diff, "```"]) in (ROOT / "docs" / "your-own-loop.md").read_text()
    added, removed = ([line for line in diff[2:] if line.startswith(sign) and line[1:]] for sign in "+-")
    assert len(removed) <= len(added) <= 10 and 55 <= len(one) <= 70


def test_the_guide_names_public_pieces_that_exist() -> None:
    guide = (ROOT / "docs" / "your-own-loop.md").read_text()
    for owner, name in re.findall(r"\b(run|world|lockstep)\.(\w+)\(", guide):
        assert hasattr({"run": lockstep.Run, "world": lockstep.World, "lockstep": lockstep}[owner], name), name
    given = re.search(r"lockstep\.Run\(world, folder, (.+?), \*\*objects\)", guide)
    settings = [p for p in inspect.signature(lockstep.Run).parameters.values() if p.kind == p.KEYWORD_ONLY]
    assert given and given[1] == ", ".join(f"{p.name}={p.default}" for p in settings)
