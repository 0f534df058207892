"""`lockstep bench`: what it measures, with whom, and what it leaves behind."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import environment

from lockstep.bench import loading
from lockstep.bench.clock import Clock, covered
from lockstep.bench.contenders import CONTENDERS, Contender
from lockstep.bench.results import Row, draw, table, write_json
from lockstep.bench.worker import request_for
from lockstep.bench.workloads import WORKLOADS, Work
from lockstep.commands.bench import run
from lockstep.options import Bench

TINY = f"{tiny.__file__}:Tiny"
ALL = """
import json, sys, time, warnings
import torch
from lockstep.bench import loading
from lockstep.bench.clock import Clock
from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.worker import request_for

warnings.filterwarnings("ignore")
for name, contender in CONTENDERS.items():
    if contender.compiles or not contender.installed():
        continue
    clock = Clock(torch.device("cpu"), 2, 3, time.time())
    flags = ["--device", "cpu", "--batch_size", "8", "--ema_decay", "0.9", "--clip_grad", "1", "--out", name]
    with clock.watching_loaders():
        contender.train(request_for(sys.argv[1], flags), clock)
    timing = clock.timing()
    assert 0 < timing.data_wait < timing.step < timing.first_step, timing
    print(json.dumps([name, clock.count]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["Tiny", "Labelled"])
def test_every_contender_makes_its_steps(recipe: str, tmp_path: Path) -> None:
    command = ["python", "-c", ALL, f"{tiny.__file__}:{recipe}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    expected = [name for name, c in CONTENDERS.items() if c.installed() and not c.compiles]
    assert {"plain loop", "by hand", "Lockstep", "Lockstep --exact"} <= set(expected)
    assert [name for name, _ in lines] == expected and all(count >= 5 for _, count in lines)


@pytest.mark.slow
def test_the_command_prints_a_table_and_leaves_figures_and_a_plot(tmp_path: Path) -> None:
    command = ["lockstep", "bench", "gpu", "--recipe", TINY, "--device", "cpu", "--steps", "2", "--warmup", "1"]
    command += ["--contenders", "plain loop; Lockstep", "--out", "bench"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "plain loop" in done.stdout
    found = json.loads((tmp_path / "bench/bench.json").read_text())
    assert [row["contender"] for row in found["rows"]] == ["plain loop", "Lockstep"]
    assert all(row["samples_per_second"] > 0 and 0 < row["peak_share"] < 1 for row in found["rows"])
    assert found["torch"] == torch.__version__ and found["steps"] == 2
    assert (tmp_path / "bench/bench.png").stat().st_size > 5_000


def test_the_global_batch_is_one_micro_batch() -> None:
    request = request_for(TINY, ["--batch_size", "4", "--global_batch_size", "16"])
    assert request.train.data.global_batch_size == request.train.data.batch_size == 4


def test_workloads_are_what_their_flags_say() -> None:
    for workload in WORKLOADS.values():
        request_for(workload.recipe, workload.flags)


def test_batches_of_a_plain_loader_have_the_recipe_s_loss(tmp_path: Path) -> None:
    work = Work(request_for(TINY, ["--device", "cpu", "--batch_size", "8", "--out", str(tmp_path)]))
    batch, index = next(iter(work.loader()))
    assert batch["x"].shape == (8, 6) and batch["x"].equal(torch.stack([work.data[int(i)]["x"] for i in index]))
    total, weight, _ = work.objective(batch, index * 0, index, None)
    assert work.loss(work.objective, batch, index) == total / weight


def test_a_clock_counts_steps_after_the_warm_up() -> None:
    clock = Clock(torch.device("cpu"), warmup=2, steps=3, started=0.0)
    assert [clock.tick() for _ in range(5)] == [False] * 4 + [True]
    assert clock.step > 0 and clock.first_step > 0 and clock.timing().device_idle is None


def test_kernels_that_overlap_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2), (6, 7)]) == 5
    assert covered([]) == 0


def test_the_cost_of_a_sample_is_that_of_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    cost = loading.measure("w", request_for(TINY, ["--batch_size", "4"]))
    assert cost.batch_size == 4 and cost.read > 0 and cost.collate > 0 and cost.augment == 0
    assert cost.as_json()["total"] == cost.total == cost.read + cost.collate
    assert run(["loader", "--recipe", TINY, "--device", "cpu", "--batch_size", "4"]) == 0
    assert "samples/s" in capsys.readouterr().out


def test_missing_packages_and_failures_are_named(tmp_path: Path) -> None:
    assert not Contender(CONTENDERS["Fabric"].train, ("no_such_package.part",)).installed()
    rows = [Row("w", "one", 8, step=0.5, first_step=1, memory=1 << 30), Row("w", "two", 8, failed="no memory")]
    table("w", rows)
    write_json(tmp_path / "b.json", rows, {"device": "x"})
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["samples_per_second"] == 16
    draw(tmp_path / "none.png", rows[1:])
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to measure"),
        (["gpu", "--work", "dit"], "no workload 'dit'.*dit-s"),
        (["gpu", "--recipe", TINY, "--device", "cpu", "--contenders", "Acelerate"], "did you mean 'Accelerate'"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        run(words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is at least 1"),
        ({"warmup": 0}, "warmup is at least 1"),
        ({"recipe": "dit", "work": "dit-s"}, "either --work or --recipe"),
    ],
)
def test_wrong_flags_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bench(**settings)
