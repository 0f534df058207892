"""Exact runs: the same bits on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from engine import lines, trainer
from torch import Tensor

from lockstep.distributed import RunFailed, World
from lockstep.exact import NotDeterministic, plain_errors

pytestmark = pytest.mark.slow

TILED = ["--exact", "--batch_size", "4", "--global_batch_size", "28", "--log_every", "1", "--ema_decay", "0.9"]
"""Seven tiles: on two, three and four ranks some have more than others."""


def exact_state(world: World, recipe: str, flags: list[str]) -> dict[str, Tensor]:
    """All tensors of the last state of a run: weights, averages, optimizer, grid."""
    run = trainer(world, recipe, flags)
    run.fit()
    tensors, _ = run.state.capture()
    return {f"{part}/{name}": tensor.clone() for part, found in tensors.items() for name, tensor in found.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in lines(folder) if name in line]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["Tiny", "Labelled", "Terms", "WithBatchNorm", "WithDropout", "Uneven"])
def test_any_number_of_ranks_gives_the_same_bits(ranks, tmp_path: Path, recipe: str, precision: str) -> None:
    flags = [*TILED, "--precision", precision, "--n_steps", "12", "--clip_grad", "1"]
    alone = exact_state(World(), recipe, [*flags, "--out", str(tmp_path / "1")])
    assert any(name.startswith("ema") for name in alone) and any("exp_avg" in name for name in alone)
    for world in (2, 3, 4) if precision == "fp32" else (3,):
        states = ranks(world)(exact_state, recipe, [*flags, "--out", str(tmp_path / str(world))])
        assert [differing(alone, state) for state in states] == [[]] * world
        assert losses(tmp_path / str(world)) == losses(tmp_path / "1")
        assert losses(tmp_path / str(world), "val/loss") == losses(tmp_path / "1", "val/loss") != []


def in_turn(worlds: tuple[int, ...], ranks, recipe: str, flags: list[str], out: Path, steps: int) -> list[Tensor]:
    """The state of a run that is stopped every few steps and goes on with another number of ranks."""
    for number, world in enumerate(worlds, 1):
        words = [*flags, "--out", str(out), "--n_steps", str(steps * number // len(worlds)), "--resume", "auto"]
        states = [exact_state(World(), recipe, words)] if world == 1 else ranks(world)(exact_state, recipe, words)
    return states[0]


def test_a_run_goes_on_with_another_number_of_ranks(ranks, tmp_path: Path) -> None:
    flags = [*TILED, "--schedule", "constant"]
    whole = exact_state(World(), "WithDropout", [*flags, "--n_steps", "12", "--out", str(tmp_path / "whole")])
    parts = in_turn((2, 1, 3, 2), ranks, "WithDropout", flags, tmp_path / "parts", 12)
    assert differing(whole, parts) == []


@pytest.mark.parametrize("recipe", ["Labelled", "WithBatchNorm"])
def test_fp16_with_its_scaler(ranks, tmp_path: Path, recipe: str) -> None:
    flags = [*TILED, "--precision", "fp16", "--n_steps", "12"]
    alone = exact_state(World(), recipe, [*flags, "--out", str(tmp_path / "1")])
    for state in ranks(3)(exact_state, recipe, [*flags, "--out", str(tmp_path / "3")]):
        assert differing(alone, state) == []


def with_spike(world: World, flags: list[str], spike: float) -> tuple[dict[str, Tensor], int]:
    """The state of a run whose loss is `spike` times as large in step 6, and how often a step was done again."""
    run = trainer(world, "Tiny", flags)
    forward, redone = run.step.replica.forward, 0
    confirm = run.step.confirm

    def spiked(batch, epochs, indices, per_sample):
        total, weight, logs = forward(batch, epochs, indices, per_sample)
        return total * (spike if run.progress.step == 5 else 1.0), weight, logs

    def counted() -> bool:
        nonlocal redone
        again = confirm()
        redone += again
        return again

    run.step.replica.forward, run.step.confirm = spiked, counted
    run.fit()
    tensors, _ = run.state.capture()
    return {f"{part}/{name}": t.clone() for part, found in tensors.items() for name, t in found.items()}, redone


@pytest.mark.parametrize(("spike", "times"), [(1.0, 0), (4.0, 0), (1e6, 1)])
def test_a_gradient_that_does_not_fit_the_grid_is_computed_again(
    ranks, tmp_path: Path, spike: float, times: int
) -> None:
    flags = [*TILED, "--n_steps", "10"]
    alone, redone = with_spike(World(), [*flags, "--log_every", "1", "--out", str(tmp_path / "1")], spike)
    assert redone == times
    seldom = [*flags, "--log_every", "100", "--out", str(tmp_path / "seldom")]  # found one step later
    assert differing(alone, with_spike(World(), seldom, spike)[0]) == []
    for state, again in ranks(3)(with_spike, [*flags, "--out", str(tmp_path / "3")], spike):
        assert again == times and differing(alone, state) == []


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_alike(ranks, tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "10"]
    alone, redone = with_spike(World(), [*flags, "--out", str(tmp_path / "1")], float("nan"))
    assert redone == 0 and all(t.isfinite().all() for t in alone.values() if t.is_floating_point())
    assert [line["skipped_steps"] for line in lines(tmp_path / "1") if "skipped_steps" in line][-1] == 1
    for state, _ in ranks(2)(with_spike, [*flags, "--out", str(tmp_path / "2")], float("nan")):
        assert differing(alone, state) == []


def test_more_ranks_than_tiles_is_refused(ranks, tmp_path: Path) -> None:
    flags = ["--exact", "--batch_size", "8", "--global_batch_size", "16", "--n_steps", "2", "--out", str(tmp_path)]
    exact_state(World(), "Tiny", flags)
    with pytest.raises(AssertionError, match="too few for 3 ranks: start up to 2"):
        ranks(3)(exact_state, "Tiny", [*flags, "--n_steps", "4", "--resume", "auto"])


def test_the_receipt_says_what_the_bits_depend_on(tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "3", "--out", str(tmp_path)]
    exact_state(World(), "WithBatchNorm", flags)
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["exact"].startswith("7 tile(s) of 4, on torch ")
    assert "BatchNorm has the statistics of each tile of 4 samples" in receipt["notes"]


def test_another_version_than_the_run_began_with_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*TILED, "--out", str(tmp_path)]
    exact_state(World(), "Tiny", [*flags, "--n_steps", "3"])
    monkeypatch.setattr("lockstep.setup.environment", lambda world: {"torch": "9.9", "CPU": "other"})
    exact_state(World(), "Tiny", [*flags, "--n_steps", "6", "--resume", "auto"])
    notes = json.loads((tmp_path / "receipt.json").read_text())["notes"]
    assert [n for n in notes if n.startswith("no longer exact: torch was 2") and n.endswith("and is 9.9")]
    monkeypatch.undo()
    run = trainer(World(), "Tiny", [*flags, "--n_steps", "9", "--resume", "auto"])
    assert len(run.state.exactness.breaks) >= 2, "what has broken it once stays known"


def starved(world: World, recipe: str, flags: list[str], rank: int, step: int) -> tuple[dict[str, Tensor], list[str]]:
    """The state of a run in which one rank has memory for two samples only in one step, and what has broken it."""
    run = trainer(world, recipe, flags)
    build = run.step.build

    def starve() -> None:
        forward = run.step.replica.forward

        def limited(batch, *rest):
            if run.progress.step == step and len(batch["x"]) > 2 and world.rank == rank:
                raise torch.OutOfMemoryError("no memory")
            return forward(batch, *rest)

        run.step.replica.forward = limited

    def build_and_starve() -> None:
        build()
        starve()

    run.step.build = build_and_starve
    starve()
    run.fit()
    tensors, _ = run.state.capture()
    state = {f"{part}/{name}": t.clone() for part, found in tensors.items() for name, t in found.items()}
    return state, run.state.exactness.breaks


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("recipe", ["Labelled", "Terms", "WithBatchNorm"])
def test_a_tile_cut_for_memory_is_recorded(ranks, tmp_path: Path, recipe: str, step: int) -> None:
    flags = [*TILED, "--n_steps", "5"]
    alone, breaks = starved(World(), recipe, [*flags, "--out", str(tmp_path / "1")], 0, step)
    assert breaks == [f"step {step + 1}: 7 tiles became 14 for lack of memory"]
    for state, broken in ranks(2)(starved, recipe, [*flags, "--out", str(tmp_path / "2")], 1, step):
        assert broken == breaks and differing(alone, state) == []


def test_the_only_tile_cut_for_memory(tmp_path: Path) -> None:
    """From then on there are sums, and a resumed run goes on with the same bits."""
    flags = ["--exact", "--batch_size", "4", "--log_every", "1", "--ema_decay", "0.9"]
    whole, breaks = starved(World(), "WithBatchNorm", [*flags, "--n_steps", "6", "--out", str(tmp_path / "a")], 0, 2)
    assert breaks == ["step 3: 1 tiles became 2 for lack of memory"] and "exact/exponents" in whole
    parts = [*flags, "--out", str(tmp_path / "b"), "--n_steps"]
    starved(World(), "WithBatchNorm", [*parts, "4"], 0, 2)
    resumed = exact_state(World(), "WithBatchNorm", [*parts, "6", "--resume", "auto"])
    assert differing(whole, resumed) == []


def with_extras(world: World, flags: list[str]) -> dict[str, Tensor]:
    """The state of a run with parameters that the optimizer does not have and a BatchNorm layer that is not trained."""
    run = trainer(world, "WithBatchNorm", flags)
    group = run.update.optimizer.param_groups[0]
    group["params"] = group["params"][2:]
    run.update.parameters = run.update.parameters[2:]
    train_mode = run.model.train

    def train(mode: bool = True):
        train_mode(mode)
        run.model[1].eval()
        return run.model

    run.model.train = train
    run.fit()
    tensors, _ = run.state.capture()
    return {f"{part}/{name}": t.clone() for part, found in tensors.items() for name, t in found.items()}


def test_parameters_outside_the_optimizer_and_layers_in_evaluation_mode(ranks, tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "12"]
    alone = with_extras(World(), [*flags, "--out", str(tmp_path / "1")])
    assert torch.equal(alone["model/1.running_var"], torch.ones(16)), "a layer that is not trained keeps its statistics"
    assert int(alone["model/1.num_batches_tracked"]) == 0
    for state in ranks(2)(with_extras, [*flags, "--out", str(tmp_path / "2")]):
        assert differing(alone, state) == []


def test_an_operator_without_a_deterministic_version_is_named() -> None:
    with pytest.raises(NotDeterministic, match="--exact: put_ has no deterministic version"), plain_errors():
        raise RuntimeError(
            "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
        )
    with pytest.raises(RuntimeError, match="something else"), plain_errors():
        raise RuntimeError("something else")


def test_dropout_depends_on_the_tile_and_not_on_what_was_drawn_before(tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "4", "--out"]
    first = exact_state(World(), "WithDropout", [*flags, str(tmp_path / "1")])
    torch.rand(1000)
    assert differing(first, exact_state(World(), "WithDropout", [*flags, str(tmp_path / "2")])) == []


def test_a_buffer_that_a_forward_pass_changes_is_refused(tmp_path: Path) -> None:
    run = trainer(World(), "Tiny", [*TILED, "--n_steps", "2", "--out", str(tmp_path)])
    run.model.register_buffer("calls", torch.zeros(()))
    run.model.register_buffer("fixed", torch.tensor([1.0, float("nan")]))
    run.step.build()
    run.model.register_forward_pre_hook(lambda *_: setattr(run.model, "calls", run.model.calls + 1))
    with pytest.raises(RunFailed, match="--exact: a forward pass changes the buffer calls"):
        run.fit()
