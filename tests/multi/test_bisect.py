"""`lockstep bisect`: the first step, tensor and cause at which two runs part."""

import json
import math
import sys
from pathlib import Path

import pytest
import tiny
import torch
from engine import trainer, trainer_for
from PIL import Image
from processes import shims

from lockstep import registry
from lockstep.commands.bisect import run as bisect
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.parting import Record, causes, curves, differing, first_difference, first_tensor
from lockstep.rundir import launch_of, read_receipt

pytestmark = pytest.mark.slow

TILED = ["--exact", "--batch_size", "4", "--global_batch_size", "28", "--history_every", "4", "--log_every", "4"]
TINY = ["--recipe", f"{tiny.__file__}:Tiny"]


@pytest.fixture(autouse=True)
def replays_of_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(shims() / "python"))


def train(folder: Path, *flags: str, fault_at: int | None = None) -> str:
    """The folder of a run of 8 steps; with `fault_at`, a bit of a weight is flipped after that step."""
    made = trainer(World(), "Tiny", [*TILED, "--n_steps", "8", "--out", str(folder), *flags])
    train_step = made.train_step

    def faulty() -> None:
        train_step()
        if made.progress.step + 1 == fault_at:
            with torch.no_grad():
                made.model[2].bias.view(torch.int32)[3] ^= 1

    made.train_step = faulty
    made.fit()
    return str(folder)


def test_runs_that_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", "--log_every", "2", "--save_every", "3")
    capsys.readouterr()
    assert bisect([a, b, *TINY, "--plot", str(tmp_path / "both.png")]) == 0
    shown = capsys.readouterr().out
    assert "settings without effect on the weights: log_every is 4 in A, 2 in B" in shown
    assert "the logged losses cannot be compared: they are means over different numbers of steps" in shown
    assert "the histories are the same at all 3 steps that both have recorded: 0 to 8" in shown
    (loss,) = [
        json.loads(row)["loss"] for row in (tmp_path / "b/metrics.jsonl").read_text().splitlines() if '"loss": ' in row
    ][-1:]
    assert "logged values: A up to step 8, B up to step 8" in shown and f"{loss:.5g}" in shown
    with Image.open(tmp_path / "both.png") as picture:
        assert picture.width > picture.height > 200


def test_a_setting_is_named_with_the_first_tensor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a = train(tmp_path / "a", "--save_every", "3")
    b = train(tmp_path / "b", "--weight_decay", "0.1", "--resume", f"{a}/checkpoints/step-00000003")
    assert bisect([a, b, *TINY]) == 1
    shown = capfd.readouterr().out
    assert "B branched off from another run after step 3" in shown
    assert "the runs part at step 4: weights (no earlier step is in both histories)" in shown
    assert "they part at step 4: first in the weights of 0.weight (6 tensor(s) differ in it)" in shown
    assert shown.endswith("cause: settings: weight_decay (0.0 and 0.1)\n")


def test_a_setting_that_a_resume_has_changed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a = train(tmp_path / "a")
    train(tmp_path / "b", "--n_steps", "6")
    b = train(tmp_path / "b", "--weight_decay", "0.1", "--resume", "auto")
    assert bisect([a, b, *TINY]) == 1
    shown = capfd.readouterr().out
    assert "the runs part at step 8" in shown and "(the same up to step 4)" in shown
    assert "does not give what it has recorded" not in shown
    assert "they part at step 7: first in the weights of 0.weight" in shown
    assert "cause: settings: weight_decay (0.0 and 0.1)" in shown
    assert "the logged losses are the same at all 1 steps that both have logged" in shown, (
        "that of 7 and 8 is no mean of 4"
    )


def test_a_machine_that_computed_wrongly_is_told_from_all_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", fault_at=6)
    assert bisect([a, b, *TINY]) == 1
    shown = capfd.readouterr().out
    assert "settings, data, code, versions, hardware and world are the same" in shown
    assert "part at step 8" in shown and "(the same up to step 4)" in shown
    assert f"a replay of {b} does not give what it has recorded of step 8" in shown
    assert f"a replay of {a} " not in shown and "both give the same up to step 8" in shown
    assert "a machine that has computed wrongly" in shown


def test_losses_show_what_the_histories_do_not_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--history_every", "100", "--log_every", "2"]
    a, b = train(tmp_path / "a", *few), train(tmp_path / "b", *few, "--lr", "0.02")
    assert bisect([a, b, *TINY, "--no_replay"]) == 1
    shown = capsys.readouterr().out
    assert "the runs part at step 2: loss (the same up to step 0)\ncause: settings: lr (0.01 and 0.02)" in shown


def test_runs_that_are_not_exact_are_compared_by_their_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--n_steps", "6", "--log_every", "2"]
    for name, more in (("a", []), ("b", ["--lr", "0.02"])):
        trainer(World(), "Tiny", [*flags, *more, "--out", str(tmp_path / name)]).fit()
    assert bisect([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    assert "settings: lr is 0.01 in A, 0.02 in B" in shown and "first differ at step 2" in shown
    assert "only exact runs have one" in shown


def test_data_and_code_of_a_launch_are_recorded(tmp_path: Path) -> None:
    train(tmp_path / "a")
    spiked = registry.find(f"{Path(__file__).parent / 'spiked.py'}:Spiked")
    flags = ["--device", "cpu", *TILED, "--size", "990", "--n_steps", "8", "--out", str(tmp_path / "b")]
    trainer_for(parse(spiked, flags, "test"), World()).fit()
    found = differing(Record.read(tmp_path / "a"), Record.read(tmp_path / "b"), 4)
    assert found["settings"] == {"size": (997, 990)} and set(found) == {"settings", "data", "recipe"}
    assert found["data"]["train"][0].startswith("997 samples, first read ")
    train(tmp_path / "c", "--seed", "5")
    found = differing(Record.read(tmp_path / "a"), Record.read(tmp_path / "c"), 4)
    assert set(found) == {"settings"}, "with another seed other samples are looked at"


def test_each_launch_counts_from_its_step_on(tmp_path: Path) -> None:
    flags = ["--schedule", "constant", "--resume", "auto"]
    train(tmp_path, *flags)
    train(tmp_path, *flags, "--n_steps", "12")
    launches = json.loads((tmp_path / "receipt.json").read_text())["launches"]
    assert [launch["step"] for launch in launches] == [0, 8]
    receipt = read_receipt(tmp_path)
    assert launch_of(receipt, 8) == launches[0] and launch_of(receipt, 9) == launches[1]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run's folder"):
        bisect([str(tmp_path), str(tmp_path)])
    (tmp_path / "receipt.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no receipt\.json that can be read"):
        bisect([str(tmp_path), str(tmp_path)])
    with pytest.raises(ValueError, match="say which runs"):
        bisect([str(tmp_path)])


def test_histories_are_compared_where_both_have_a_line() -> None:
    a = {0: {"weights": "x", "chain": "1"}, 4: {"weights": "y"}, 8: {"weights": "z"}}
    b = {0: {"weights": "x", "chain": "2"}, 2: {"weights": "q"}, 8: {"weights": "w"}}
    parting = first_difference(a, b)
    assert parting and (parting.step, parting.fields, parting.same) == (8, ["weights"], 0)
    assert first_difference(a, a) is None


def test_losses_that_are_not_numbers_differ_from_numbers_only() -> None:
    found = curves({1: 0.5, 2: None, 3: 0.25}, {1: 0.5, 2: None, 3: 0.5, 4: 1.0})
    assert found and (found.count, found.first, found.largest, found.at) == (3, 3, 0.25, 3)
    found = curves({1: None}, {1: 0.5})
    assert found and found.largest == math.inf
    assert curves({1: 0.5}, {2: 0.5}) is None


def test_the_first_tensor_is_that_of_the_gradient() -> None:
    a = {"3": {"weights": {"x": 1}}, "4": {"gradient": {"x": 1, "y": 2}, "weights": {"x": 5}}}
    b = {"3": {"weights": {"x": 1}}, "4": {"gradient": {"x": 1, "y": 3}, "weights": {"x": 6}}}
    assert first_tensor(a, b) == (4, "gradient", "y", 1) and first_tensor(a, a) is None


def test_replays_rule_out_causes() -> None:
    both = {"settings": {"lr": (1, 2)}, "hardware": {"GPU": ("H100", "H200")}, "world": {"ranks": (1, 2)}}
    assert causes(both, None).startswith("cause: one of these")
    assert causes(both, True) == "cause: settings: lr (1 and 2)"
    assert causes(both, False) == "cause: hardware: GPU (H100 and H200)"
    assert "computed wrongly" in causes({"world": {"ranks": (1, 2)}}, None)
