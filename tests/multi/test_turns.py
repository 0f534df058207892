"""Several optimizers that take turns, and parameters that take part only in some steps: the same on any world."""

import json
import signal
from pathlib import Path

import pytest
import torch
from engine import lines, trainer_for
from torch import Tensor, nn

from lockstep.distributed import RunFailed, World
from lockstep.flags import parse
from lockstep.gradient_sums import Bucket
from lockstep.trainer import Trainer
from multi import gan
from multi.test_launch import run as run_command

State = dict[str, Tensor]
EVERYTHING = ["--ema_decay", "0.9", "--clip_grad", "0.3", "--schedule", "cosine", "--warmup_steps", "3"]
EXACT = ["--exact", "--dropout", "0.3", "--batch_norm", "--spot_check_every", "2", "--history_every", "1"]


def made(kind: str, flags: list[str], world: World) -> Trainer:
    return trainer_for(parse(getattr(gan, kind), ["--device", "cpu", "--n_steps", "12", *flags], "test"), world)


def state_of(trainer: Trainer) -> State:
    tensors, _ = trainer.state.capture()
    return {f"{part}/{name}": tensor.clone() for part, found in tensors.items() for name, tensor in found.items()}


def fitted(world: World, kind: str, flags: list[str], stop_after: int = 0) -> State:
    """All tensors of the last state of a run, which a signal stops after some step."""
    trainer = stopping(made(kind, flags, world), stop_after)
    trainer.fit()
    return state_of(trainer)


def stopping(trainer: Trainer, after: int) -> Trainer:
    """Let a signal stop the run after some step; 0: never."""
    train_step = trainer.train_step

    def step() -> None:
        trainer.signals.received = signal.SIGTERM if trainer.progress.step == after - 1 else 0
        train_step()

    trainer.train_step = step  # type: ignore[method-assign]
    return trainer


def assert_close(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-9 * a[name].norm(), name


def differing(a: State, b: State) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def test_each_turn_is_a_plain_update_of_its_own_optimizer(tmp_path: Path) -> None:
    """Against a hand-written loop, which freezes nothing and uses the same batches."""
    trainer = made("Gan", ["--precision", "fp64", "--batch_size", "14", "--out", str(tmp_path)], World())
    recipe, model = trainer.recipe, gan.Gan(trainer.recipe.options).model()
    model.load_state_dict(trainer.model.state_dict())
    optimizers = {name: torch.optim.AdamW(model[name].parameters(), 0.01) for name in "d"}
    optimizers["g"] = torch.optim.SGD(model["g"].parameters(), 0.02, momentum=0.5)
    batches = [micro for step in range(12) for micro in [trainer.step._fetch(trainer.step.stream.batch(step), 0)]]
    trainer.fit()
    for step, micro in enumerate(batches):
        recipe.step.fill_(step)
        recipe.turn = "g" if step % 3 == 2 else "d"
        loss = recipe.loss(model, micro.batch, gan.Rng.of(0, micro.epochs, micro.indices))
        model.zero_grad()
        (loss.total / loss.weight).backward()
        optimizers[recipe.turn].step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_values_have_the_name_of_their_turn_and_batches_are_used_up_once(tmp_path: Path) -> None:
    fitted(World(), "Gan", ["--n_steps", "30", "--out", str(tmp_path)])
    by_step = {line["step"]: line for line in lines(tmp_path) if "samples_per_second" in line}
    assert {"d_loss", "d_accuracy"} <= by_step[1].keys() and "g_loss" not in by_step[1]
    assert "g_loss" in by_step[3] and "d_loss" not in by_step[3] and "loss" not in by_step[3]
    assert by_step[30]["d_lr"] == 0.01 and by_step[30]["g_lr"] == 0.02
    assert by_step[30]["epochs_proven"] == 2 and by_step[30]["epoch"] == pytest.approx(30 / 2 * 14 / 101)
    assert {"val/d_loss", "val/g_loss", "val/d_accuracy"} <= lines(tmp_path)[-2].keys()
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["optimizer"].startswith("d: AdamW, g: SGD") and "d: 0.01, g: 0.02" in receipt["learning rate"]


def test_ranks_make_no_difference_in_fp64(ranks, tmp_path: Path) -> None:
    flags = [*EVERYTHING, "--precision", "fp64"]
    alone = fitted(World(), "Gan", [*flags, "--out", str(tmp_path / "1")])
    assert {name.partition("/")[0] for name in alone} == {"model", "optimizer-d", "optimizer-g", "ema-0.9"}
    for world in (2, 3):
        for state in ranks(world)(fitted, "Gan", [*flags, "--out", str(tmp_path / str(world))]):
            assert_close(alone, state)
        for one, other in zip(lines(tmp_path / "1"), lines(tmp_path / str(world)), strict=True):
            names = [name for name in one if "loss" in name or "norm" in name or name.endswith("lr")]
            assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-9)


def test_ranks_make_no_difference_to_the_bit_and_spot_checks_agree(ranks, tmp_path: Path) -> None:
    flags = [*EVERYTHING, *EXACT]
    alone = fitted(World(), "Gan", [*flags, "--out", str(tmp_path / "1")])
    for world in (2, 3):
        states = ranks(world)(fitted, "Gan", [*flags, "--out", str(tmp_path / str(world))])
        assert [differing(alone, state) for state in states] == [[]] * world
        assert (tmp_path / str(world) / "history.jsonl").read_text() == (tmp_path / "1/history.jsonl").read_text()


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_goes_on_in_the_middle_of_a_batch_on_another_number_of_ranks(ranks, tmp_path: Path, exact: bool) -> None:
    flags = [*EVERYTHING, *(EXACT if exact else ["--precision", "fp64"])]
    whole = fitted(World(), "Gan", [*flags, "--out", str(tmp_path / "whole")])
    parts = [*flags, "--out", str(tmp_path / "parts"), "--resume", "auto"]
    ranks(2)(fitted, "Gan", parts, 5)
    for state in ranks(3)(fitted, "Gan", parts):
        assert differing(whole, state) == [] if exact else assert_close(whole, state) is None


def test_a_gradient_that_is_not_finite_skips_the_turn_of_all_ranks_in_fp16(ranks, tmp_path: Path) -> None:
    flags = ["--exact", "--precision", "fp16", "--spike_at", "5", "--max_bad_share", "1"]
    alone = fitted(World(), "Gan", [*flags, "--out", str(tmp_path / "1")])
    for state in ranks(2)(fitted, "Gan", [*flags, "--out", str(tmp_path / "2")]):
        assert differing(alone, state) == []
    skipped = [line["skipped_steps"] for line in lines(tmp_path / "2") if "skipped_steps" in line]
    assert skipped[5] == skipped[4] + 1
    assert "not finite at step 6" in (tmp_path / "2/log.txt").read_text()


def starved(world: World, kind: str, flags: list[str]) -> State:
    """From step 5 on the last rank has room for two samples at once."""
    trainer = made(kind, flags, world)
    loss = trainer.recipe.loss

    def tight(model: nn.Module, batch: dict[str, Tensor], rng: gan.Rng) -> gan.Loss:
        if trainer.progress.step >= 5 and world.rank == world.size - 1 and model.training and len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("injected")
        return loss(model, batch, rng)

    trainer.recipe.loss = tight  # type: ignore[method-assign]
    trainer.step.build()
    trainer.fit()
    return state_of(trainer)


@pytest.mark.parametrize("kind", ["Gan", "Branches"])
def test_too_little_memory_on_one_rank_makes_smaller_pieces(ranks, tmp_path: Path, kind: str) -> None:
    flags = ["--precision", "fp64", "--global_batch_size", "14", "--find_unused_parameters"]
    alone = fitted(World(), kind, [*flags, "--out", str(tmp_path / "1")])
    for state in ranks(2)(starved, kind, [*flags, "--out", str(tmp_path / "2")]):
        assert_close(alone, state)
    assert "out of memory at step 6" in (tmp_path / "2/log.txt").read_text()


def starved_while_sending(world: World, flags: list[str]) -> State:
    """In step 6 the last rank's memory does not suffice for a bucket that is sent when backward is over."""
    trainer, send, failed = made("Branches", flags, world), Bucket.send, list[int]()

    def tight(bucket: Bucket, integers: bool = False) -> None:
        if trainer.progress.step == 5 and world.rank == world.size - 1 and bucket.waiting and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("injected")
        send(bucket, integers)

    Bucket.send = tight  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        Bucket.send = send  # type: ignore[method-assign]
    assert failed or world.rank < world.size - 1
    return state_of(trainer)


def test_too_little_memory_for_a_sum_is_agreed_on(ranks, tmp_path: Path) -> None:
    flags = ["--precision", "fp64", "--global_batch_size", "14", "--find_unused_parameters"]
    alone = fitted(World(), "Branches", [*flags, "--out", str(tmp_path / "1")])
    for state in ranks(2)(starved_while_sending, [*flags, "--out", str(tmp_path / "2")]):
        assert_close(alone, state)
    assert "out of memory at step 6" in (tmp_path / "2/log.txt").read_text()


@pytest.mark.parametrize("exact", [True, False])
def test_parameters_may_take_part_in_some_steps_or_never(ranks, tmp_path: Path, exact: bool) -> None:
    flags = ["--find_unused_parameters", "--global_batch_size", "14", *EVERYTHING]
    flags += ["--exact", "--batch_size", "4"] if exact else ["--precision", "fp64"]
    alone = fitted(World(), "Branches", [*flags, "--out", str(tmp_path / "1")])
    assert any("optimizer/odd" in name for name in alone) and not any("optimizer/never" in name for name in alone)
    for world in (2, 3):
        for state in ranks(world)(fitted, "Branches", [*flags, "--out", str(tmp_path / str(world))]):
            assert differing(alone, state) == [] if exact else assert_close(alone, state) is None


def refused(world: World, flags: list[str]) -> str:
    with pytest.raises(RunFailed) as caught:
        fitted(world, "Branches", flags)
    return str(caught.value)


def test_without_the_flag_the_error_names_it(ranks, tmp_path: Path) -> None:
    for message in ranks(2)(refused, ["--global_batch_size", "14", "--out", str(tmp_path / "run")]):
        assert "only in some steps" in message and "give --find_unused_parameters" in message


def not_sharded(world: World, kind: str, flags: list[str]) -> str:
    with pytest.raises(ValueError, match="--shard") as caught:
        made(kind, flags, world)
    return str(caught.value)


def test_state_is_not_sharded_over_ranks(ranks, tmp_path: Path) -> None:
    flags = ["--shard", "optimizer", "--find_unused_parameters", "--out", str(tmp_path)]
    assert "several take turns: use --shard none" in ranks(2)(not_sharded, "Gan", flags)[0]
    assert "--find_unused_parameters, not both" in ranks(2)(not_sharded, "Branches", flags)[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [torch.optim.SGD(model.parameters(), 0.1)]", "returned a list, not a dict of optimizers"),
        ("return {'d': torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)}", "a parameter that is not in model"),
        ("return {'d': 0.1}", "a float under 'd'"),
        ("return {'g': torch.optim.SGD(model.parameters(), 0.1)}", r"turn_of\(0\) returned 'd'; it returns a name in"),
    ],
)
def test_wrong_optimizers_are_refused_with_the_right_form(tmp_path: Path, body: str, message: str) -> None:
    scope = {"torch": torch, "nn": nn}
    exec(f"def optimizers(self, model): {body}", scope)
    kind = type("Wrong", (gan.Gan,), {"optimizers": scope["optimizers"], "name": "wrong"})
    with pytest.raises(ValueError, match=message):
        trainer_for(parse(kind, ["--device", "cpu", "--out", str(tmp_path)], "test"), World()).fit()


@pytest.mark.slow
def test_verify_compares_a_gan(tmp_path: Path) -> None:
    for bits in ([], ["--bits", "--batch_norm"]):
        flags = ["--worlds", "1,3", "--steps", "6", *bits]
        done = run_command(["lockstep", "verify", f"{gan.__file__}:Gan", *flags], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "DIFFERENT" not in done.stdout
