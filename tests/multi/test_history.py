"""The history of exact runs: the same on any number of ranks, whole after a kill, and honest about changes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine import trainer

from lockstep.distributed import World
from lockstep.watch.history import read_history
from multi.test_launch import run as command

pytestmark = pytest.mark.slow

TILED = ["--exact", "--batch_size", "4", "--global_batch_size", "28", "--schedule", "constant", "--log_every", "3"]


def run(world: World, recipe: str, flags: list[str]) -> None:
    trainer(world, recipe, flags).fit()


def on(world: int, ranks, recipe: str, flags: list[str]) -> None:
    run(World(), recipe, flags) if world == 1 else ranks(world)(run, recipe, flags)


def text(folder: Path) -> str:
    return (folder / "history.jsonl").read_text()


def test_any_number_of_ranks_writes_the_same_history(ranks, tmp_path: Path) -> None:
    flags = [*TILED, "--n_steps", "10", "--history_every", "2"]
    for world in (1, 2, 3):
        on(world, ranks, "WithBatchNorm", [*flags, "--out", str(tmp_path / str(world))])
    assert text(tmp_path / "1") == text(tmp_path / "2") == text(tmp_path / "3")
    lines, problem = read_history(tmp_path / "1")
    assert problem is None and list(lines) == [0, 2, 4, 6, 8, 10]
    assert lines[4]["samples"] == [84, 112] and lines[4]["tiles"] == 7
    assert len({line["weights"] for line in lines.values()}) == 6
    assert len({line["gradient"] for line in lines.values() if line["step"]}) == 5


KILLED = """
import os
import signal
from tiny import WithDropout

class Killed(WithDropout):
    name = "killed"
    def loss(self, model, batch, rng):
        if self.calls == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, rng)
"""


@pytest.mark.slow
def test_a_real_kill_and_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    words = ["lockstep", "train", "killed.py:Killed", "--device", "cpu", *TILED, "--history_every", "2"]
    words += ["--save_every", "5", "--log_every", "1", "--n_steps", "16", "--resume", "auto"]
    assert command([*words, "--out", "whole"], tmp_path).returncode == 0
    killed = command([*words, "--out", "parts", "--nproc", "2"], tmp_path, KILL_AT="50")
    assert killed.returncode == 128 + 9, killed.stderr
    before = list(read_history(tmp_path / "parts")[0])
    assert command([*words, "--out", "parts", "--nproc", "3"], tmp_path).returncode == 0
    assert 0 < before[-1] < 16 and text(tmp_path / "parts") == text(tmp_path / "whole")


def test_the_last_digest_is_in_console_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(World(), "Tiny", [*TILED, "--n_steps", "7", "--history_every", "3", "--out", str(tmp_path)])
    lines, _ = read_history(tmp_path)
    state = json.loads((tmp_path / "checkpoints/last/state.json").read_text())["history"]
    assert (state["step"], state["chain"]) == (6, lines[6]["chain"]) and state["weights"] != lines[6]["weights"]
    assert f"weights after step 7: {state['weights']}; chain up to step 6: {state['chain']}" in capsys.readouterr().out


def test_steps_done_again_and_skipped_are_counted(ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        folder = str(tmp_path / str(world))
        work = with_bad_steps if world == 1 else None
        flags = [*TILED, "--n_steps", "8", "--history_every", "1", "--out", folder]
        work(World(), flags) if work else ranks(world)(with_bad_steps, flags)
    lines, _ = read_history(tmp_path / "1")
    assert [line["redone_steps"] for line in lines.values() if line["step"]] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [line["skipped_steps"] for line in lines.values() if line["step"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert lines[5]["weights"] == lines[4]["weights"] and lines[5]["loss"] is None
    assert text(tmp_path / "1") == text(tmp_path / "2")


def with_bad_steps(world: World, flags: list[str]) -> None:
    """A run whose third step has a gradient too large for the grid, and whose fifth has none that is finite."""
    made = trainer(world, "Tiny", flags)
    forward = made.step.replica.forward

    def spiked(*arguments):
        total, weight, logs = forward(*arguments)
        return total * {2: 1e6, 4: float("nan")}.get(made.progress.step, 1.0), weight, logs

    made.step.replica.forward = spiked
    made.fit()


def test_a_line_that_was_changed_is_found(tmp_path: Path) -> None:
    run(World(), "Tiny", [*TILED, "--n_steps", "6", "--history_every", "2", "--out", str(tmp_path)])
    rows = text(tmp_path).splitlines()

    def read(*rows: str) -> tuple[list[int], str]:
        (tmp_path / "history.jsonl").write_text("\n".join(rows))
        lines, problem = read_history(tmp_path)
        return list(lines), str(problem)

    changed = read(rows[0], rows[1].replace('"tiles": 7', '"tiles": 8'), *rows[2:], "")
    assert changed[0] == [0] and "line 2 does not follow from those before it" in changed[1]
    assert "line 2 does not follow" in read(rows[0], *rows[2:], "")[1]
    assert "line 2 is not one that a run writes" in read(rows[0], "[1]", "")[1]
    assert read(rows[0], rows[1][:50]) == ([0], "None"), "cut off by a kill, or just being written"


def test_a_history_that_was_off_for_a_while_goes_on_with_its_chain(tmp_path: Path) -> None:
    flags = [*TILED, "--history_every", "2", "--out", str(tmp_path), "--resume", "auto", "--save_every", "3"]
    run(World(), "Tiny", [*flags, "--n_steps", "8"])
    shutil.rmtree(tmp_path / "checkpoints/step-00000008")  # as a kill leaves it
    run(World(), "Tiny", [*flags, "--n_steps", "9", "--history_every", "0"])
    assert list(read_history(tmp_path)[0]) == [0, 2, 4, 6], "nothing after the checkpoint at step 6"
    run(World(), "Tiny", [*flags, "--n_steps", "12"])
    lines, problem = read_history(tmp_path)
    assert problem is None and list(lines) == [0, 2, 4, 6, 10, 12]


def test_a_disk_that_is_full_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(World(), "Tiny", [*TILED, "--n_steps", "9", "--history_every", "1", "--out", str(tmp_path)])

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lockstep.files.StepLines.append", full)
    made.fit()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("history.jsonl cannot be written, and is tried again: no space left") == 1


def test_other_runs_have_none(tmp_path: Path) -> None:
    run(World(), "Tiny", ["--n_steps", "3", "--out", str(tmp_path / "plain")])
    run(World(), "Tiny", [*TILED, "--n_steps", "3", "--history_every", "0", "--out", str(tmp_path / "off")])
    assert not list(tmp_path.rglob("history.jsonl"))


def test_one_tile_has_a_history_too(tmp_path: Path) -> None:
    flags = ["--exact", "--batch_size", "8", "--n_steps", "4", "--history_every", "2", "--out"]
    for name in ("a", "b"):
        run(World(), "Tiny", [*flags, str(tmp_path / name)])
        torch.rand(7)
    assert text(tmp_path / "a") == text(tmp_path / "b") and len(read_history(tmp_path / "a")[0]) == 3
