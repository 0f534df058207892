"""lockstep audit --worlds: where a run on two ranks parts from one on one rank, and why."""

import json
import subprocess
from pathlib import Path

import pytest
from processes import environment

from lockstep.audit.compare.flags import with_batch_size
from lockstep.audit.compare.worlds import compare
from lockstep.audit.events import Backward, Batch, Buffers, Event, LossValue, RandomDraw, Step, StepStart
from lockstep.audit.model import Rank, Trace

SCRIPT = Path(__file__).with_name("scaled.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "flags", "expected"),
    [
        (["--batch-arg", "--batch_size"], ["--batch_size", "4"], []),
        ([], ["--fault", "mean"], ["worlds-loss"]),
        ([], ["--fault", "lr"], ["worlds-lr"]),
    ],
)
def test_real_runs_are_compared(tmp_path: Path, own: list[str], flags: list[str], expected: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    words = ["lockstep", "audit", "--worlds", "1,2", "--steps", "4", "--json", "a.json", *own, "train.py", *flags]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == len(expected), done.stdout + done.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    assert [f["name"] for f in report["findings"]] == expected
    assert any("× 2 on 1 rank and × 1 on 2 ranks" in note for note in report["notes"])
    assert expected or any("over 4 steps the losses" in note for note in report["notes"])


# -- the comparison, without processes --------------------------------------------------------------------------------
def trace(world: int, fault: str = "", steps: int = 4) -> Trace:
    """Ranks that share a global batch of four samples; on two ranks with a fault."""
    ranks = []
    wrong = fault if world > 1 else ""
    for rank in range(world):
        recorded: list[Event] = [Buffers(0, 1, {}, ["norm"])] if wrong == "batch-norm" else []
        for n in range(1, steps + 1):
            shift = 100 if wrong == "data" and n > 2 else 0
            recorded.append(Batch(0, 1, 4 // world, True, [4 * n + i + shift for i in range(rank, 4, world)]))
            recorded += [RandomDraw(n, 1, "randn", [4], rank)] if wrong == "randomness" else []
            drift = {"loss": 0.1, "batch-norm": 0.1, "randomness": 0.1, "update": 0.1 * (n > 1), "lr": 0.1 * (n > 1)}
            recorded += [LossValue(1 / n + drift.get(wrong, 0.0)), Backward()]
            recorded.append(StepStart(0, n, {"w": int(wrong == "weights")}, {}, {}))
            recorded.append(Step(0, n, [0.1 * (2 if wrong == "lr" else 1)]))
        ranks.append(Rank(rank, recorded, [], 0))
    return Trace(ranks)


def test_equal_runs_have_no_finding_and_the_difference_is_said() -> None:
    found, notes = compare([trace(1), trace(2), trace(4)])
    assert found == []
    assert notes == [f"over 4 steps the losses on 1 rank and {n} ranks differ by 0 at most" for n in (2, 4)]


@pytest.mark.parametrize("cause", ["lr", "weights", "loss", "update", "batch-norm", "randomness"])
def test_each_cause_is_named(cause: str) -> None:
    found, _ = compare([trace(1), trace(2, cause)])
    assert [one.kind.name for one in found] == [f"worlds-{cause}"]


def test_other_samples_are_named_with_their_step() -> None:
    found, _ = compare([trace(1), trace(2, "data")])
    assert [one.kind.name for one in found] == ["worlds-samples"] and found[0].what.startswith("step 3 on 2 ranks")


def test_a_script_without_steps_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="took no step"):
        compare([trace(1, steps=0), trace(2)])


def test_the_batch_size_of_the_script_is_multiplied() -> None:
    assert with_batch_size(["t.py", "--bs", "4", "--lr", "1"], "--bs", 2) == ["t.py", "--bs", "8", "--lr", "1"]
    assert with_batch_size(["t.py", "--bs=4"], "--bs", 2) == ["t.py", "--bs=8"]
    with pytest.raises(ValueError, match="give the script this flag"):
        with_batch_size(["t.py"], "--bs", 2)
