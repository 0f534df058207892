"""Kinds of training beside the plain one: annealing, teachers, a schedule and an optimizer of the recipe's own."""

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import lines, trainer_for
from safetensors.torch import load_file
from tiny import Tiny
from torch import Tensor, nn

from lockstep import AfterStep, Loss, Rng, Schedules
from lockstep.distributed import World
from lockstep.flags import parse


class Taught(Tiny, AfterStep, Schedules):
    """A student that follows an average of itself, more and more, with a learning rate of its own."""

    name = "taught"

    def model(self) -> nn.Module:
        student = super().model()
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        share = (self.step + 1) / self.n_steps
        out = model["student"](batch["x"])  # type: ignore[index]
        taught = (out - model["teacher"](batch["x"])).square()  # type: ignore[index]
        error = (1 - share) * (out - batch["y"]).square() + share * taught
        return Loss(error.sum(), error.numel(), share=(share * error.numel()).to(error.dtype))

    def after_step(self, model: nn.Module) -> None:
        pairs = zip(model["teacher"].parameters(), model["student"].parameters(), strict=True)  # type: ignore[index]
        for teacher, student in pairs:
            teacher.lerp_(student, 0.1)

    def lr_factor(self, step: int) -> float:
        return 1 / (1 + step)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model["student"].parameters(), self.optim.lr, weight_decay=0.01)  # type: ignore[index]


def fitted(world: World, flags: list[str]) -> dict[str, Any]:
    run = trainer_for(parse(Taught, flags, "taught"), world)
    run.fit()
    return {"model": {n: t.clone() for n, t in run.model.state_dict().items()}, "step": int(run.recipe.step)}


FLAGS = ["--n_steps", "10", "--lr", "0.5", "--log_every", "1", "--batch_size", "4", "--global_batch_size", "16"]


def test_step_teacher_schedule_and_optimizer_are_the_recipes(tmp_path: Path) -> None:
    ends = fitted(World(), [*FLAGS, "--momentum", "0.5", "--warmup_steps", "3", "--out", str(tmp_path)])
    assert ends["step"] == 9, "the last step, counted from 0"
    logged = [line for line in lines(tmp_path) if "share" in line]
    assert [line["share"] for line in logged] == pytest.approx([n / 10 for n in range(1, 11)])
    assert [line["lr"] for line in logged] == pytest.approx([0.5 / n for n in range(1, 11)])
    assert not torch.equal(ends["model"]["teacher.0.weight"], ends["model"]["student.0.weight"])
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["learning rate"] == "0.5, the recipe's own" and receipt["optimizer"].startswith("SGD")
    notes = " ".join(receipt["notes"])
    assert "momentum has no effect: the recipe has an optimizer of its own" in notes
    assert "warmup_steps has no effect: the recipe has a schedule of its own" in notes


@pytest.mark.parametrize("exact", [False, True])
def test_they_are_the_same_on_any_number_of_ranks_and_when_resumed(ranks, tmp_path: Path, exact: bool) -> None:
    flags = [*FLAGS, "--exact"] if exact else [*FLAGS, "--precision", "fp64"]
    alone = fitted(World(), [*flags, "--out", str(tmp_path / "1")])["model"]
    out = ["--out", str(tmp_path / "2"), "--save_every", "5", "--resume", "auto"]
    assert stopped_after(5, [*flags, *out]) == 5
    for end in ranks(2)(fitted, [*flags, *out]):
        for name, tensor in alone.items():
            assert torch.equal(end["model"][name], tensor) if exact else torch.allclose(end["model"][name], tensor)


def stopped_after(step: int, flags: list[str]) -> int:
    """Train a run of ten steps until a signal stops it after `step`."""
    run = trainer_for(parse(Taught, flags, "taught"), World())
    train_step = run.train_step

    def stop_at_last() -> None:
        run.signals.received = signal.SIGTERM if run.progress.step == step - 1 else 0
        train_step()

    run.train_step = stop_at_last  # type: ignore[method-assign]
    return run.fit().step


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_a_teacher_follows_in_a_sharded_exact_run_to_the_bit(ranks, tmp_path: Path, shard: str) -> None:
    """Small tensors, which --shard full keeps whole on every rank too, must get what after_step writes."""
    flags = [*FLAGS, "--exact", "--lr", "0.05"]
    ranks(2)(fitted, [*flags, "--out", str(tmp_path / "none")])
    ranks(2)(fitted, [*flags, "--shard", shard, "--out", str(tmp_path / shard)])
    plain, sharded = (load_file(tmp_path / kind / "model.safetensors") for kind in ("none", shard))
    assert [name for name in plain if not torch.equal(plain[name], sharded[name])] == []
