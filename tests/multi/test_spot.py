"""Spot checks: a rank that computes wrongly is found and named, and one that does not is never accused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import lines, trainer
from torch import Tensor

from lockstep import Trainer
from lockstep.distributed import RunFailed, World
from multi.test_exact import TILED, differing, exact_state

ALWAYS = [*TILED, "--n_steps", "8", "--spot_check_every", "1"]
STEP, RANK = 4, 1
"""Where the fault is: in the fifth step, of rank 1."""


def flip(tensor: Tensor, bit: int = 12) -> None:
    """Flip one bit of the element in the middle, in place."""
    tensor.detach().view(-1)[tensor.numel() // 2 :][:1].view(torch.int32).bitwise_xor_(1 << bit)


def activation(run: Trainer, due: Callable[[], bool]) -> None:
    """Flip a bit of an activation, another one each time: a device that fails now and then."""
    calls = iter(range(10**6))

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if not (module.training and due()):
            return None
        spoilt = output.clone()
        flip(spoilt, 5 + next(calls) % 15)
        return spoilt

    run.model[0].register_forward_hook(spoil)


def stuck_activation(run: Trainer, due: Callable[[], bool]) -> None:
    """The same bit of an activation is wrong each time."""

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if not (module.training and due()):
            return None
        spoilt = output.clone()
        flip(spoilt)
        return spoilt

    run.model[0].register_forward_hook(spoil)


def tile_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """The gradient of a tile, before it is added up."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        if due():
            flip(spoilt)
        return spoilt

    run.model[2].weight.register_hook(spoil)


def summed_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """What a rank has added up over its tiles, before the all-reduce."""
    add = run.state.sums.add

    def spoil(gradients: Any, last: bool) -> None:
        add(gradients, last)
        if last and due():
            flip(gradients[0][1])

    run.state.sums.add = spoil


def sent_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """The same while it is on its way: no rank can be named."""
    all_reduce = dist.all_reduce

    def spoil(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options.get("async_op") and tensor.dtype == torch.int32 and due():
            flip(tensor)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = spoil


def weights(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.model[2].weight))


def optimizer(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.update.optimizer.state[run.model[2].weight]["exp_avg"]))


def ema(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.state.emas[0].shadow["2.weight"]))


def _before_step(run: Trainer, due: Callable[[], bool], spoil: Callable[[], None]) -> None:
    step = run.step.run

    def spoilt(stop_request: int = 0) -> int:
        if due():
            spoil()
        return step(stop_request)

    run.step.run = spoilt


def disturbed(
    world: World, recipe: str, flags: list[str], fault: str, times: int, rank: int = RANK
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
        globals()[fault](run, due)
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


FAULTS = {
    "activation": "rank 1 has computed wrongly: tile",
    "tile_gradient": "rank 1 has computed wrongly: tile",
    "summed_gradient": "rank 1 has added up the gradients of its tiles wrongly, first the gradient of",
    "sent_gradient": "the sum of gradients over all ranks is wrong on the way between them, first the gradient of",
    "weights": "rank 1 holds wrong weights, optimizer state or averages: 1 tensor(s) differ, first 2.weight",
    "optimizer": "rank 1 holds wrong weights, optimizer state or averages: 1 tensor(s) differ, first optimizer/2",
    "ema": "rank 1 holds wrong weights, optimizer state or averages: 1 tensor(s) differ, first ema-0.9/2.weight",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_flipped_bit_stops_the_run_and_names_rank_and_step(ranks, tmp_path: Path, fault: str) -> None:
    found = ranks(3)(disturbed, "Tiny", [*ALWAYS, "--out", str(tmp_path)], fault, -1)
    for error, *_ in found:
        assert error.startswith(f"silent data corruption at step {STEP + 1}: {FAULTS[fault]}"), error


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The last state of a run on one rank."""
    return exact_state(World(), "Tiny", [*ALWAYS, "--out", str(tmp_path_factory.mktemp("clean"))])


@pytest.mark.parametrize(
    ("world", "fault"),
    [(3, fault) for fault in FAULTS] + [(2, fault) for fault in FAULTS if fault.endswith(("activation", "gradient"))],
)
def test_healing_a_flipped_bit_ends_with_the_bits_of_a_run_without_it(
    ranks, clean: dict[str, Tensor], tmp_path: Path, world: int, fault: str
) -> None:
    flags = [*ALWAYS, "--on_corruption", "heal", "--out", str(tmp_path)]
    # An activation is wrong in each of the rank's tiles (two of three ranks, four of two) and in the one it repeats.
    times = {2: 5, 3: 3}[world] if fault in ("activation", "tile_gradient") else 1
    for error, state, corruptions, breaks in ranks(world)(disturbed, "Tiny", flags, fault, times):
        assert (error, corruptions, breaks) == ("", 1, [])
        assert differing(clean, state) == []
    assert f"silent data corruption at step {STEP + 1}: {FAULTS[fault]}" in (tmp_path / "log.txt").read_text()
    assert [line["corruptions"] for line in lines(tmp_path) if "corruptions" in line] == [0] * 4 + [1] * 4


def test_of_two_ranks_the_one_that_contradicts_itself_is_named(ranks, tmp_path: Path) -> None:
    for rank in (0, 1):
        flags = [*ALWAYS, "--out", str(tmp_path / str(rank))]
        for error, *_ in ranks(2)(disturbed, "Tiny", flags, "activation", -1, rank):
            assert error.startswith(f"silent data corruption at step 5: rank {rank} has computed wrongly: tile"), error
    flags = [*ALWAYS, "--out", str(tmp_path / "always")]
    for error, *_ in ranks(2)(disturbed, "Tiny", flags, "stuck_activation", -1):
        assert "at step 5: rank 0 or 1 has computed wrongly, no third rank shows which: tile" in error


def test_of_three_ranks_one_that_is_always_wrong_is_named_and_not_healed(ranks, tmp_path: Path) -> None:
    flags = [*ALWAYS, "--on_corruption", "heal", "--out", str(tmp_path)]
    for error, _, corruptions, _ in ranks(3)(disturbed, "WithBatchNorm", flags, "stuck_activation", -1, 2):
        assert "at step 5: rank 2 has computed wrongly: tile" in error and "in 4 attempts" in error
        assert corruptions == 4


def test_a_rank_is_found_within_the_steps_between_two_checks(ranks, tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "12", "--spot_check_every", "7", "--out", str(tmp_path)]
    for error, *_ in ranks(3)(disturbed, "Tiny", flags, "activation", -1):
        assert "at step 8: rank 1 has computed wrongly" in error


def test_a_warning_is_said_counted_and_recorded(ranks, tmp_path: Path) -> None:
    flags = [*ALWAYS, "--on_corruption", "warn", "--out", str(tmp_path)]
    found = ranks(3)(disturbed, "Tiny", flags, "activation", -1)
    assert [(error, count) for error, _, count, _ in found] == [("", 4)] * 3
    assert len(found[0][3]) == 4 and found[0][3][0].startswith("step 5: rank 1 has computed wrongly: tile")
    assert "--on_corruption warn: training continues with it" in (tmp_path / "log.txt").read_text()
    assert [line["corruptions"] for line in lines(tmp_path) if "corruptions" in line] == [0] * 4 + [1, 2, 3, 4]


@pytest.mark.parametrize("recipe", ["Tiny", "Labelled", "Terms", "WithBatchNorm", "WithDropout", "Uneven", "Augmented"])
def test_a_run_without_a_fault_is_never_accused_and_has_the_same_bits(ranks, tmp_path: Path, recipe: str) -> None:
    flags = [*TILED, "--n_steps", "10", "--clip_grad", "1"]
    without = [*flags, "--spot_check_every", "0", "--out", str(tmp_path / "without")]
    clean = ranks(3)(disturbed, recipe, without, "", 0)[0][1]
    checked = [*flags, "--spot_check_every", "1", "--out", str(tmp_path / "checked")]
    for error, state, corruptions, breaks in ranks(3)(disturbed, recipe, checked, "", 0):
        assert (error, corruptions, breaks) == ("", 0, [])
        assert differing(clean, state) == []
    losses = [[line["loss"] for line in lines(tmp_path / run) if "loss" in line] for run in ("without", "checked")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_are_not_accused(ranks, tmp_path: Path, precision: str) -> None:
    flags = [*ALWAYS, "--precision", precision, "--out", str(tmp_path)]
    assert [found[0] for found in ranks(2)(disturbed, "WithBatchNorm", flags, "", 0)] == ["", ""]


def test_by_default_one_tile_in_two_hundred_is_repeated(ranks, tmp_path: Path) -> None:
    ranks(3)(disturbed, "Tiny", [*TILED, "--n_steps", "1", "--out", str(tmp_path)], "", 0)
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["exact"].endswith("; every 67 step(s) each rank repeats a tile of another one"), "three tiles a step"


@pytest.mark.parametrize("spike", [1e6, float("nan")])
def test_a_gradient_that_does_not_fit_the_grid_is_no_fault(ranks, tmp_path: Path, spike: float) -> None:
    flags = [*ALWAYS, "--out", str(tmp_path)]
    assert ranks(3)(spiked, flags, spike) == [0, 0, 0]


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
    assert ranks(2)(starved, [*ALWAYS, "--out", str(tmp_path)]) == [(0, 8), (0, 8)]


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


@pytest.mark.parametrize("fault", ["weights", "optimizer", "ema"])
def test_a_rank_that_holds_other_tensors_is_healed_at_the_next_log_or_checkpoint(
    ranks, tmp_path: Path, fault: str
) -> None:
    flags = [*TILED, "--n_steps", "8", "--spot_check_every", "0", "--save_every", "5", "--on_corruption", "heal"]
    for error, _, corruptions, breaks in ranks(3)(disturbed, "Tiny", [*flags, "--out", str(tmp_path)], fault, 1):
        assert (error, corruptions, len(breaks)) == ("", 1, fault != "ema")
    text = (tmp_path / "log.txt").read_text()
    assert "those of rank 1 are not those of the others" in text and "copied from rank 0, training continues" in text


def test_two_ranks_that_hold_other_tensors_cannot_be_healed(ranks, tmp_path: Path) -> None:
    flags = ["--on_corruption", "heal", "--out"]
    for error, *_ in ranks(2)(disturbed, "Tiny", [*ALWAYS, *flags, str(tmp_path / "spot")], "weights", 1):
        assert "no majority shows which rank holds wrong weights" in error
    never = [*TILED, "--n_steps", "8", "--spot_check_every", "0"]
    for error, *_ in ranks(2)(disturbed, "Tiny", [*never, *flags, str(tmp_path / "log")], "weights", 1):
        assert "no majority shows which" in error
