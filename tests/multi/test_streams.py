"""Iterable training sets of recipes: each item once, on any number of ranks, resumed at any step."""

import json
from pathlib import Path

import pytest
from engine import lines, trainer_for

from lockstep import OutOfLockstep
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.trainer import Trainer
from multi import streams
from multi.test_turns import EVERYTHING, State, assert_close, differing, state_of, stopping

EXACT = ["--exact", "--spot_check_every", "2"]


def made(kind: str, flags: list[str], world: World) -> Trainer:
    return trainer_for(parse(getattr(streams, kind), ["--device", "cpu", "--n_steps", "12", *flags], "test"), world)


def fitted(world: World, kind: str, flags: list[str], stop_after: int = 0) -> State:
    trainer = stopping(made(kind, flags, world), stop_after)
    trainer.fit()
    return state_of(trainer)


@pytest.mark.parametrize("kind", ["Streamed", "StreamedGan"])
@pytest.mark.parametrize("exact", [True, False])
def test_ranks_and_a_stop_make_no_difference(ranks, tmp_path: Path, kind: str, exact: bool) -> None:
    flags = [*EVERYTHING, *(EXACT if exact else ["--precision", "fp64"])]
    alone = fitted(World(), kind, [*flags, "--out", str(tmp_path / "1")])
    parts = [*flags, "--out", str(tmp_path / "parts"), "--resume", "auto"]
    ranks(2)(fitted, kind, parts, 5)
    for states in (ranks(3)(fitted, kind, parts), ranks(2)(fitted, kind, [*flags, "--out", str(tmp_path / "2")])):
        for state in states:
            assert differing(alone, state) == [] if exact else assert_close(alone, state) is None


def test_a_length_makes_epochs_and_their_proof_possible(ranks, tmp_path: Path) -> None:
    flags = ["--kind", "sized", "--epochs", "3", "--warmup_epochs", "1", "--out", str(tmp_path)]
    request = parse(streams.Streamed, ["--device", "cpu", *flags], "test")
    assert trainer_for(request, World()).fit().step == 12, "3 epochs of 53 samples, 14 in a step"
    last = [line for line in lines(tmp_path) if "epochs_proven" in line][-1]
    assert last["epochs_proven"] == 3 and last["epoch"] == pytest.approx(12 * 14 / 53)
    assert "the data set is iterable: every rank reads all of it" in " ".join(notes(tmp_path))


def notes(folder: Path) -> list[str]:
    return json.loads((folder / "receipt.json").read_text())["notes"]


def test_the_receipt_says_what_cannot_be_checked_without_a_length(tmp_path: Path) -> None:
    fitted(World(), "Streamed", ["--out", str(tmp_path)])
    assert "it has no __len__, so it is not checked that an epoch uses each sample once" in " ".join(notes(tmp_path))
    assert json.loads((tmp_path / "receipt.json").read_text())["data"] == "iterable, of unknown length"
    assert "epoch" not in lines(tmp_path)[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval_every", "1ep"], "no __len__, so an epoch has no known length: give steps"),
        (["--warmup_epochs", "1"], "no __len__, so an epoch has no known length: give steps"),
        (["--kind", "short"], r"epoch 0 of the iterable data set has 53 item\(s\), not the 54 of its len\(\)"),
        (["--kind", "unknown", "--size", "0"], r"has 0 item\(s\), fewer than one"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(World(), "Streamed", [*flags, "--out", str(tmp_path)])


def test_epochs_need_a_length(tmp_path: Path) -> None:
    request = parse(streams.Streamed, ["--device", "cpu", "--epochs", "2", "--out", str(tmp_path)], "test")
    with pytest.raises(ValueError, match="no __len__, so an epoch has no known length: give --n_steps"):
        trainer_for(request, World())


def refused(world: World, flags: list[str]) -> str:
    with pytest.raises(OutOfLockstep) as caught:
        fitted(world, "Streamed", flags)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["split", "later"])
def test_ranks_that_read_other_items_are_refused(ranks, tmp_path: Path, kind: str) -> None:
    for message in ranks(2)(refused, ["--kind", kind, "--out", str(tmp_path / "run")]):
        assert "not the same on rank 0 and rank 1" in message or "hash of the last item read" in message
