"""The engine on real ranks: the same as a loop written by hand, and of one mind."""

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from engine import lines, train, trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from lockstep.distributed import World
from lockstep.outcome import Diverged
from lockstep.stream import Stream


def by_hand(world: World, steps: int, micro: int, accumulation: int) -> dict[str, Tensor]:
    """What a careful user would have written with plain DDP."""
    torch.manual_seed(0)
    recipe = tiny.Plain()
    model = recipe.model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    data = recipe.dataset("train")
    stream = Stream(len(data), micro * accumulation * world.size, seed=0)
    for step in range(steps):
        mine = stream.batch(step, world.rank, world.size).index.tolist()
        for i in range(accumulation):
            batch = default_collate([data[j] for j in mine[i * micro : (i + 1) * micro]])
            with nullcontext() if i == accumulation - 1 else ddp.no_sync():
                (F.mse_loss(ddp(batch["x"]), batch["y"]) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del ddp
    gc.collect()
    return weights


@pytest.mark.parametrize("accumulation", [1, 3])
def test_twenty_steps_equal_those_of_a_loop_written_by_hand(ranks, tmp_path: Path, accumulation: int) -> None:
    flags = ["--n_steps", "20", "--clip_grad", "1.0", "--gradient_accumulation_steps", str(accumulation)]
    ours = ranks(2)(train, "Plain", [*flags, "--out", str(tmp_path / "run")])
    hand = ranks(2)(by_hand, 20, 8, accumulation)
    start = tiny.Plain().model().state_dict()
    for name in start:
        assert torch.equal(ours[0][name], ours[1][name])
        torch.testing.assert_close(ours[0][name], hand[0][name], rtol=1e-5, atol=1e-6)


def test_weights_move_at_all(ranks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = tiny.Plain().model().state_dict()
    ours = ranks(2)(train, "Plain", ["--n_steps", "3", "--out", str(tmp_path / "run")])
    assert all(not torch.equal(ours[0][name], start[name]) for name in start)


def bad_run(world: World, flags: list[str]) -> tuple[dict[str, Tensor], int, str]:
    run = trainer(world, "Tiny", flags)
    run.recipe.calls = 0  # the passes before the first step do not count
    if world.rank == 1:
        run.recipe.options.poison_from = 5  # on one rank alone
    error = ""
    try:
        run.fit()
    except Diverged as diverged:
        error = str(diverged)
    return run.model.state_dict(), int(run.update.bad_steps), error


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_is_counted(ranks, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    flags = ["--n_steps", "12", "--poison_to", "8", "--out", out]
    (first, bad, error), (second, *_) = ranks(2)(bad_run, flags)
    assert (bad, error) == (3, "")
    assert all(torch.equal(first[name], second[name]) and torch.isfinite(first[name]).all() for name in first)
    assert [line["skipped_steps"] for line in lines(Path(out)) if "skipped_steps" in line] == [0, 3, 3]


def test_bad_gradients_without_end_stop_the_run_on_all_ranks(ranks, tmp_path: Path) -> None:
    flags = ["--n_steps", "50", "--max_bad_steps", "8", "--max_bad_share", "1", "--out", str(tmp_path / "run")]
    (weights, bad, error), (_, _, other) = ranks(2)(bad_run, flags)
    assert bad == 10 and "not finite" in error and error == other
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def drifting(world: World, flags: list[str]) -> str:
    run = trainer(world, "Tiny", flags)
    step = run.train_step

    def spoilt() -> None:
        step()
        if world.rank == 1 and run.progress.step == 6:
            with torch.no_grad():
                run.model[2].weight[0, 0] += 1e-3

    run.train_step = spoilt  # type: ignore[method-assign]
    try:
        run.fit()
    except RuntimeError as error:
        return str(error)
    return ""


def test_replicas_that_drift_apart_are_found_and_named(ranks, tmp_path: Path) -> None:
    messages = ranks(2)(drifting, ["--out", str(tmp_path / "run")])
    assert all("first 2.weight; no majority" in text for text in messages), messages
    messages = ranks(3)(drifting, ["--global_batch_size", "24", "--out", str(tmp_path / "three")])
    assert all("first 2.weight; those of rank 1 are not those of the others" in text for text in messages), messages


def corrupted(world: World, flags: list[str], what: str) -> str:
    """One bit of one rank's averages or optimizer state flips right before a checkpoint."""
    run = trainer(world, "Tiny", ["--ema_decay", "0.9", *flags])
    step = run.train_step

    def spoilt() -> None:
        step()
        if world.rank == 1 and run.progress.step == 9:
            state = run.update.optimizer.state[run.model[2].weight]
            tensor = state["exp_avg_sq"] if what == "optimizer" else run.state.emas[0].shadow["2.weight"]
            tensor.view(torch.int32)[3, 5] ^= 1

    run.train_step = spoilt  # type: ignore[method-assign]
    try:
        run.fit()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "name"), [("optimizer", "optimizer/2.weight/exp_avg_sq"), ("ema", "ema-0.9/2.weight")]
)
def test_a_bit_that_flips_in_averages_or_optimizer_is_found(ranks, tmp_path: Path, what: str, name: str) -> None:
    flags = ["--global_batch_size", "24", "--save_every", "10", "--out", str(tmp_path / "run")]
    messages = ranks(3)(corrupted, flags, what)
    expected = f"1 differ, first {name}; those of rank 1 are not those of the others"
    assert all(expected in text for text in messages), messages


def repeating(world: World, flags: list[str]) -> str:
    run = trainer(world, "Tiny", flags)
    original = run.step.loader.step

    def twice():  # both ranks train on rank 0's samples, as a forgotten sampler makes them
        for micro in original():
            part = Stream(run.setup.batching.dataset, run.setup.batching.global_batch, 0).batch(
                run.progress.step, 0, world.size
            )
            yield micro._replace(samples=part)

    run.step.loader.step = twice  # type: ignore[method-assign]
    try:
        run.fit()
    except RuntimeError as error:
        return str(error)
    return ""


def test_samples_that_two_ranks_share_are_found(ranks, tmp_path: Path) -> None:
    flags = ["--size", "64", "--n_steps", "40", "--out", str(tmp_path / "run")]
    messages = ranks(2)(repeating, flags)
    assert all("epoch 0" in text for text in messages), messages


def test_a_whole_run_proves_its_epochs(ranks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks(3)(train, "Tiny", ["--size", "101", "--global_batch_size", "20", "--n_steps", "16", "--out", str(out)])
    assert [line["epochs_proven"] for line in lines(out) if "epochs_proven" in line][-1] == 3


def test_only_rank_0_writes(ranks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks(2)(train, "Tiny", ["--n_steps", "5", "--save_every", "2", "--out", str(out)])
    steps = sorted(p.name for p in (out / "checkpoints").iterdir() if p.name.startswith("step-"))
    assert steps == ["step-00000002", "step-00000004", "step-00000005"]
    assert len([line for line in lines(out) if "loss" in line]) == 1
    assert torch.load(out / "model.pth", weights_only=True).keys() == tiny.Tiny().model().state_dict().keys()


def timeout_of(world: World) -> float:
    import torch.distributed as dist

    groups = [dist.group.WORLD, world.cpu_group]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]  # type: ignore


def test_the_timeout_flag_reaches_the_process_groups(ranks) -> None:
    assert ranks(2)(timeout_of) == [[120.0, 120.0]] * 2


def sampling(world: World, flags: list[str]) -> int:
    """Rank 1 cannot list the samples: rank 0 may be moving them at that moment."""
    run = trainer(world, "Generating", flags)
    if world.rank == 1:
        run.sampler._existing = lambda stem: (_ for _ in ()).throw(FileNotFoundError(stem))  # type: ignore[method-assign]
    return run.fit().step


def test_only_rank_0_looks_for_samples_that_were_made_before(ranks, tmp_path: Path) -> None:
    assert ranks(2)(sampling, ["--n_steps", "4", "--sample_every", "2", "--out", str(tmp_path / "run")]) == [4, 4]
