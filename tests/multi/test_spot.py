"""Spot checks: a rank that computes wrongly is found and named, and one that does not is never accused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import lines, trainer
from torch import Tensor

from lockstep import exact, setup
from lockstep.distributed import RunFailed, World
from multi import wrong_ranks
from multi.test_exact import TILED, differing, exact_state

pytestmark = pytest.mark.slow

SHORT = [*TILED, "--n_steps", "4"]
ALWAYS = [*SHORT, "--spot_check_every", "1"]
STEP = 2
"""Where the fault is: in the third step."""


def disturbed(
    world: World, recipe: str, flags: list[str], fault: str, times: int, rank: int = 1
) -> tuple[str, dict[str, Tensor], int, list[str]]:
    """How a run ends in which `fault` happens `times` times on one rank from STEP on.

    Its error, its last state, how many faults were found, and what broke its exactness.
    """
    run, left, all_reduce = trainer(world, recipe, flags), times, dist.all_reduce

    def due() -> bool:
        nonlocal left
        if world.rank != rank or run.progress.step < STEP or left == 0:
            return False
        left -= 1
        return True

    if fault:
        getattr(wrong_ranks, fault)(run, due)
    try:
        run.fit()
        error = ""
    except RunFailed as raised:
        error = str(raised)
    finally:
        dist.all_reduce = all_reduce
    tensors, _ = run.state.capture()
    state = {f"{part}/{name}": t.clone() for part, found in tensors.items() for name, t in found.items()}
    return error, state, run.watch.corruptions, run.state.exactness.breaks


def corruptions(folder: Path) -> list[int]:
    return [line["corruptions"] for line in lines(folder) if "corruptions" in line]


HOLDS = "the ranks hold different weights, optimizer state or averages: 1 tensor(s), first "
FAULTS = {
    "activation": "rank 1 has computed tile",
    "tile_gradient": "rank 1 has computed tile",
    "summed_gradient": "rank 1 has added up the gradients of its tiles wrongly (first difference: the gradient of",
    "sent_gradient": "the all-reduce has summed the gradients wrongly, and no rank can be named (first difference: the",
    "weights": f"{HOLDS}2.weight; those of rank 1 are not those of the others; rank 1 is cpu on ",
    "optimizer": f"{HOLDS}optimizer/2.weight/exp_avg; those of rank 1 are not",
    "ema": f"{HOLDS}ema-0.9/2.weight; those of rank 1 are not",
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The last state of a run on one rank."""
    return exact_state(World(), "Tiny", [*ALWAYS, "--out", str(tmp_path_factory.mktemp("clean"))])


@pytest.mark.parametrize(("world", "fault"), [*((3, fault) for fault in FAULTS), (2, "activation")])
def test_a_flipped_bit_is_found_and_healed_with_the_bits_of_a_run_without_it(
    ranks, clean: dict[str, Tensor], tmp_path: Path, world: int, fault: str
) -> None:
    flags = [*ALWAYS, "--on_corruption", "heal", "--out", str(tmp_path)]
    # An activation is wrong in each of the rank's tiles (two of three ranks, four of two) and in the one it repeats.
    times = {2: 5, 3: 3}[world] if fault in ("activation", "tile_gradient") else 1
    for error, state, found, breaks in ranks(world)(disturbed, "Tiny", flags, fault, times):
        assert (error, found, breaks) == ("", 1, [])
        assert differing(clean, state) == []
    assert f"silent data corruption at step {STEP + 1}: {FAULTS[fault]}" in (tmp_path / "log.txt").read_text()
    assert corruptions(tmp_path) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("recipe", "fault", "what"),
    [("Labelled", "loss_weight", "the weight of the loss"), ("Terms", "term_count", "the element counts of its terms")],
)
def test_what_gradients_are_divided_by_is_compared_too(
    ranks, tmp_path: Path, recipe: str, fault: str, what: str
) -> None:
    for error, *_ in ranks(3)(disturbed, recipe, [*ALWAYS, "--out", str(tmp_path)], fault, -1):
        assert error.startswith(f"silent data corruption at step {STEP + 1}: rank 1 has computed tile"), error
        assert f"wrongly (first difference: {what}); rank 1 is cpu on " in error
        assert "resume from the last checkpoint" in error and "--on_corruption heal repeats" in error


def test_of_two_ranks_the_one_that_contradicts_itself_is_named(ranks, tmp_path: Path) -> None:
    for error, *_ in ranks(2)(disturbed, "Tiny", [*ALWAYS, "--out", str(tmp_path / "0")], "activation", -1, 0):
        assert error.startswith(f"silent data corruption at step {STEP + 1}: rank 0 has computed tile"), error
    for error, *_ in ranks(2)(disturbed, "Tiny", [*ALWAYS, "--out", str(tmp_path)], "stuck_activation", -1):
        assert f"at step {STEP + 1}: rank 0 and rank 1 get different bits for tile" in error
        assert "a third rank would show which; or the loss depends on the rank" in error


def test_of_three_ranks_one_that_is_always_wrong_is_named_and_not_healed(ranks, tmp_path: Path) -> None:
    flags = [*ALWAYS, "--on_corruption", "heal", "--out", str(tmp_path)]
    for error, _, found, _ in ranks(3)(disturbed, "WithBatchNorm", flags, "stuck_activation", -1, 2):
        assert f"at step {STEP + 1}: rank 2 has computed tile" in error and "it was the same in 4 attempts" in error
        assert found == 4


def test_a_resumed_run_on_other_ranks_is_checked_in_the_same_steps(ranks, tmp_path: Path) -> None:
    """A check every fourth step, the fault after the resume: it is found in step 5."""
    flags = [*TILED, "--spot_check_every", "4", "--out", str(tmp_path), "--resume", "auto", "--n_steps"]
    assert ranks(2)(disturbed, "Tiny", [*flags, "2"], "", 0)[0][0] == ""
    for error, *_ in ranks(3)(disturbed, "Tiny", [*flags, "6"], "activation", -1):
        assert "at step 5: rank 1 has computed tile" in error
        assert "steps since the check at step 1 may be wrong too; resume from a checkpoint of step 1 or before" in error


def test_a_warning_is_said_counted_and_recorded(ranks, tmp_path: Path) -> None:
    flags = [*ALWAYS, "--on_corruption", "warn", "--out", str(tmp_path)]
    found = ranks(3)(disturbed, "Tiny", flags, "activation", -1)
    assert [(error, count) for error, _, count, _ in found] == [("", 2)] * 3
    assert [text.partition(" tile ")[0] for text in found[0][3]] == [f"step {STEP + 1}: rank 1 has computed"], "once"
    assert "training continues with it (--on_corruption warn)" in (tmp_path / "log.txt").read_text()
    assert corruptions(tmp_path) == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [("Labelled", "fp32"), ("Terms", "fp32"), ("WithBatchNorm", "fp16"), ("WithDropout", "bf16"), ("Uneven", "fp32")],
)
def test_a_run_without_a_fault_is_never_accused_and_has_the_same_bits(
    ranks, tmp_path: Path, recipe: str, precision: str
) -> None:
    flags = [*ALWAYS, "--clip_grad", "1", "--precision", precision, "--out"]
    alone = exact_state(World(), recipe, [*flags, str(tmp_path / "alone")])
    for error, state, found, breaks in ranks(3)(disturbed, recipe, [*flags, str(tmp_path / "checked")], "", 0):
        assert (error, found, breaks) == ("", 0, [])
        assert differing(alone, state) == []
    losses = [[line["loss"] for line in lines(tmp_path / run) if "loss" in line] for run in ("alone", "checked")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("random_loss", "a tile does not have the same bits on all ranks, and no single rank is wrong: a loss must"),
        ("random_data", "the ranks do not read the same samples for tile"),
    ],
)
def test_a_recipe_that_cannot_be_repeated_is_said_and_no_rank_is_accused(
    ranks, tmp_path: Path, fault: str, cause: str
) -> None:
    for error, *_ in ranks(2)(disturbed, "Tiny", [*SHORT, "--out", str(tmp_path)], fault, 0):
        assert error.startswith(f"the run is not exact at step 1: {cause}"), error
        assert "--spot_check_every 0 turns spot checks off" in error


def test_a_model_that_changes_a_buffer_is_refused_and_no_rank_is_accused(ranks, tmp_path: Path) -> None:
    for error, *_ in ranks(3)(disturbed, "Tiny", [*SHORT, "--out", str(tmp_path)], "counting_buffer", 0):
        assert error.startswith("--exact: a forward pass changes the buffer calls"), error


@pytest.mark.parametrize("spike", [1e6, float("nan")])
def test_a_gradient_that_does_not_fit_the_grid_is_no_fault(ranks, tmp_path: Path, spike: float) -> None:
    assert ranks(3)(spiked, [*ALWAYS, "--out", str(tmp_path)], spike) == [0, 0, 0]


def spiked(world: World, flags: list[str], spike: float) -> int:
    """Faults that are found in a run whose loss is `spike` times as large in one step."""
    run = trainer(world, "Labelled", flags)
    forward = run.step.replica.forward

    def spoil(*arguments: Any) -> Any:
        total, weight, logs = forward(*arguments)
        return total * (spike if run.progress.step == STEP else 1.0), weight, logs

    run.step.replica.forward = spoil
    run.fit()
    return run.watch.corruptions


def test_a_tile_that_another_rank_has_no_memory_to_repeat_is_not_compared(ranks, tmp_path: Path) -> None:
    assert ranks(2)(starved, [*ALWAYS, "--out", str(tmp_path)]) == [(0, 4), (0, 4)]
    text = (tmp_path / "log.txt").read_text()
    assert text.count("rank 0, 1 has not enough memory to repeat a tile, which is not compared then") == 1


def starved(world: World, flags: list[str]) -> tuple[int, int]:
    run = trainer(world, "Tiny", flags)
    forward, batching, refused = run.step.replica.forward, run.setup.batching, 0

    def no_memory(batch: Any, epochs: Tensor, indices: Tensor, per_sample: Any) -> Any:
        nonlocal refused
        own = run.step.stream.tiles(run.progress.step, batching.own(world.rank), batching.tiles)
        if not any(set(indices.tolist()) <= set(tile.index.tolist()) for tile in own):
            refused += 1
            raise torch.OutOfMemoryError("no memory")
        return forward(batch, epochs, indices, per_sample)

    run.step.replica.forward = no_memory
    run.fit()
    return run.watch.corruptions, refused


def test_a_compiled_model_is_not_compiled_again_for_a_repetition(ranks, tmp_path: Path) -> None:
    assert ranks(2)(graphs, [*ALWAYS, "--out", str(tmp_path)]) == [(1, 0), (1, 0)]


def graphs(world: World, flags: list[str]) -> tuple[int, int]:
    """How many graphs an exact run compiles, and faults that it finds."""
    made = []
    with exact.kernels_restored():
        run = trainer(world, "WithBatchNorm", flags)
        exact._configure_compiler(True)
        run.step.replica.objective.compile(dynamic=False, backend=lambda graph, _: made.append(graph) or graph.forward)
        run.fit()
    return len(made), run.watch.corruptions


def test_ranks_with_different_kernels_are_not_compared_by_tile(ranks, tmp_path: Path) -> None:
    ranks(2)(on_different_kernels, [*TILED, "--n_steps", "1", "--out", str(tmp_path)])
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["exact"].endswith("; no spot checks, since ranks differ in CPU") and corruptions(tmp_path) == []


def on_different_kernels(world: World, flags: list[str]) -> None:
    found = setup.environment
    setup.environment = lambda world: found(world) | {"CPU": f"kind {world.rank}"}
    try:
        trainer(world, "Tiny", flags).fit()
    finally:
        setup.environment = found


@pytest.mark.parametrize("fault", ["weights", "ema"])
def test_a_rank_that_holds_other_tensors_is_healed_at_the_next_log_or_checkpoint(
    ranks, tmp_path: Path, fault: str
) -> None:
    flags = [*SHORT, "--save_every", "3", "--on_corruption", "heal", "--out", str(tmp_path)]  # a spot check in step 1
    for error, _, found, breaks in ranks(3)(disturbed, "Tiny", flags, fault, 1):
        assert (error, found, len(breaks)) == ("", 1, fault != "ema")
    text = (tmp_path / "log.txt").read_text()
    assert "those of rank 1 are not those of the others" in text and "copied from rank 0, training continues" in text
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["exact"].endswith("; spot check every 200 step(s): each rank repeats a tile of another one")


def test_two_ranks_that_hold_other_tensors_cannot_be_healed(ranks, tmp_path: Path) -> None:
    flags = ["--on_corruption", "heal", "--out"]
    for error, *_ in ranks(2)(disturbed, "Tiny", [*ALWAYS, *flags, str(tmp_path / "spot")], "weights", 1):
        assert "no majority shows which are wrong" in error and "on_corruption heal" not in error
    never = [*SHORT, "--spot_check_every", "0", *flags, str(tmp_path / "log")]
    for error, *_ in ranks(2)(disturbed, "Tiny", never, "weights", 1):
        assert "no majority shows which" in error
