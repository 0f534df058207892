"""Where the time goes: kinds of work, what is written down, and what a user is told."""

import json
from pathlib import Path

import pytest
from engine import train, trainer

from lockstep import activity
from lockstep.activity import Activity
from lockstep.distributed import World
from lockstep.watch.stragglers import StepTime
from lockstep.watch.times import Advice, Times, workers_for


def test_phases_within_a_phase_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(activity.time, "perf_counter", lambda: now)
    rank = Activity()
    rank.enter(activity.STEP)
    now = 3.0
    with rank.during(activity.EVALUATION):
        now = 10.0
        with rank.during(activity.SAVING):
            now = 11.0
    now = 12.0
    spent = {phase: seconds for phase, seconds in rank.seconds().items() if seconds}
    assert spent == {"step": 4.0, "evaluation": 7.0, "saving": 1.0}


def test_the_time_of_steps_is_divided_into_kinds_of_work() -> None:
    steps = [StepTime(own=3.0, data=1.0, communication=0.5, update=0.25)] * 2
    rank = Times(steps, {activity.FIRST_STEP: 5.0, activity.STEP: 5.0, activity.LOGGING: 1.0, activity.SAVING: 2.0})
    on_cpu = {"data": 2.0, "computation": 6.5, "communication": 1.0, "optimizer": 0.5, "logging": 1.0, "saving": 2.0}
    assert rank.by_kind(on_gpu=False) == on_cpu
    on_gpu = rank.by_kind(on_gpu=True)  # the host waits for the device when it logs
    assert on_gpu["computation"] == 7.5 and "logging" not in on_gpu and sum(on_gpu.values()) == sum(on_cpu.values())


def minute(**shares: float) -> dict[str, float]:
    return {kind: 60 * share for kind, share in shares.items()}


def test_a_rank_that_waits_for_data_is_named_with_the_workers_it_needs() -> None:
    advice = Advice(num_workers=2, cores=16)
    ranks = [minute(computation=0.95, data=0.05), minute(computation=0.5, data=0.5)]
    assert advice.add(ranks) == "rank 1 waits 50% of its time for data: --num_workers 4"
    assert Advice(2, 16).add([ranks[1]] * 2) == "each rank waits 50% of its time for data: --num_workers 4"
    assert Advice(2, 16).add([ranks[1]]) == "training waits 50% of its time for data: --num_workers 4"
    few = Advice(2, 3).add([ranks[1]])
    assert few is not None and "3 cores per rank do not suffice" in few


def test_nothing_is_said_before_a_minute_of_steps_and_then_once() -> None:
    advice, second = Advice(0, 8), {"computation": 0.5, "data": 0.5}
    said = [advice.add([second]) for _ in range(121)]
    assert [number for number, text in enumerate(said) if text] == [59, 119]


def test_communication_is_advised_on_only_without_a_straggler() -> None:
    slow = minute(computation=0.4, communication=0.6)
    text = Advice(0, 8).add([slow] * 2)
    assert text is not None and "60% of their time on summing gradients" in text and "--batch_size" in text
    assert Advice(0, 8).add([slow] * 2, has_straggler=True) is None
    assert Advice(0, 8).add([minute(computation=0.95, data=0.05)]) is None


@pytest.mark.parametrize(("waiting", "workers", "needed"), [(0.5, 4, 8), (0.5, 0, 1), (0.8, 0, 4), (0.1, 2, 3)])
def test_the_number_of_workers_follows_from_the_share_of_waiting(waiting: float, workers: int, needed: int) -> None:
    assert workers_for(waiting, workers) == needed


def test_a_run_writes_down_its_times_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run"), "--log_every", "2", "--save_every", "4", "--eval_every", "4"]
    train(World(), "Labelled", [*out, "--n_steps", "4"])
    train(World(), "Labelled", [*out, "--n_steps", "8", "--resume", "auto"])
    lines = [json.loads(line) for line in (tmp_path / "run/times.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4, 6, 8, 8]
    kinds = {kind for line in lines for kind in line["ranks"][0]}
    assert {"computation", "evaluation", "saving", "start-up"} <= kinds
    for line in lines:
        assert len(line["ranks"]) == 1 and all(seconds >= 0 for seconds in line["ranks"][0].values())


def test_a_long_evaluation_shows_how_far_it_is(tmp_path: Path) -> None:
    run = trainer(World(), "Labelled", ["--out", str(tmp_path / "run")])
    shown = list[str]()
    with run.evaluator.shown("step 3: evaluation", shown.append, after=0.0):
        run.evaluator.evaluate(run.setup.validation, 64)
    assert shown[0] == "step 3: evaluation" and shown[-1].startswith("step 3: evaluation: ")
    done, total = shown[-1].removeprefix("step 3: evaluation: ").split(" of ")
    assert done == total and int(total) == len(run.setup.validation)
    shown.clear()
    with run.evaluator.shown("step 3: evaluation", shown.append, after=60.0):
        run.evaluator.evaluate(run.setup.validation, 64)
    assert not shown, "a short one is not worth a line"
