"""The hang watch without ranks: what counts as progress, how long phases may take, what is said of whom."""

import threading
import time
from pathlib import Path

import pytest
import tiny
import torch

from lockstep import activity, fit
from lockstep.activity import Activity
from lockstep.distributed import World
from lockstep.watch.diagnosis import RankState, diagnose
from lockstep.watch.hang import HangWatch
from lockstep.watch.idle import IdleClock
from lockstep.watch.stacks import Line, is_compiling, stack_of, waits_in
from lockstep.watch.stragglers import StepTime, Stragglers, find_straggler

TORCH = Path(torch.__file__).parent


def clock(phase: str = activity.STEP) -> IdleClock:
    return IdleClock(Activity(phase=phase), 10)


def test_only_a_mark_is_progress() -> None:
    watched = clock()
    for _ in range(3):
        watched.tick(2)
    assert watched.idle == 6
    watched.activity.marks += 1
    watched.tick(2)
    assert watched.idle == 0


def test_a_phase_may_take_three_times_as_long_as_it_has_taken_before() -> None:
    watched = clock()
    assert watched.limit(waits=False) == 10
    watched.tick(8)
    watched.activity.marks += 1
    watched.tick(1)
    assert watched.limit(waits=False) == 24
    with watched.activity.during(activity.EVALUATION):
        watched.tick(1)
        assert watched.limit(waits=False) == 50  # the steps before say nothing about it


@pytest.mark.parametrize("phase", [activity.START_UP, activity.SAVING, activity.CLOSING])
def test_a_phase_of_unknown_length_has_no_limit_unless_it_waits_for_other_ranks(phase: str) -> None:
    assert clock(phase).limit(waits=False) is None and clock(phase).limit(waits=True) == 10


def test_compilation_counts_as_progress_and_compiled_code_does_not() -> None:
    seen: list[float] = []
    watched = clock()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        watched.tick(100)
        seen.append(watched.idle)
        return graph.forward

    @torch.compiler.disable
    def look() -> None:
        assert not is_compiling()

    def function(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    compiled = torch.compile(function, backend=backend)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert seen and set(seen) == {0.0}
    torch._dynamo.reset()


class Event:
    def __init__(self, done: bool):
        self.done = done

    def query(self) -> bool:
        return self.done


def test_steps_that_the_gpu_finishes_are_progress_while_the_host_waits_for_it() -> None:
    watched = clock(activity.LOGGING)
    watched.activity.device_steps.extend([Event(True), Event(False)])  # type: ignore[list-item]
    watched.tick(2)
    assert watched.idle == 0 and len(watched.activity.device_steps) == 1
    watched.tick(2)
    assert watched.idle == 2


def test_a_thread_in_a_collective_is_seen_with_the_line_that_called_it() -> None:
    user, own = Line("/home/train.py", 7, "loss", "dist.broadcast(x, 0)"), Line("/home/run.py", 1, "main", "")
    inside = [Line(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper", "")]
    inside += [Line(f"{TORCH}/distributed/distributed_c10d.py", 2800, "broadcast", "")]
    assert waits_in([own, user, *inside]) == ("broadcast", user)
    assert waits_in([own, user, Line(f"{TORCH}/_tensor.py", 600, "backward", "")]) == ("backward", user)
    assert waits_in([own, *inside, user]) is None
    assert waits_in(stack_of(threading.get_ident())) is None


def in_collective(rank: int, name: str, number: int) -> RankState:
    inside = Line(f"{TORCH}/distributed/distributed_c10d.py", 1, name, "")
    return RankState(rank, phase=activity.STEP, stack=[Line("/home/train.py", number, "loss", ""), inside])


def test_ranks_that_do_the_same_are_named_together() -> None:
    stuck = RankState(2, phase=activity.STEP, step=4, stack=[Line("/home/train.py", 3, "loss", "spin()")])
    assert diagnose([in_collective(0, "all_reduce", 7), in_collective(1, "all_reduce", 7), stuck]) == [
        "rank 2 is stuck in step 5 at /home/train.py:3 in loss: spin()",
        "rank 0, 1 waits in all_reduce at /home/train.py:7 in loss",
    ]


def test_when_all_ranks_wait_it_is_said_whether_for_the_same() -> None:
    same = diagnose([in_collective(rank, "all_reduce", 7) for rank in range(2)])
    assert "every rank is in the same collective" in same[0] and same[1].startswith("rank 0, 1 waits in all_reduce")
    assert diagnose([in_collective(0, "all_reduce", 7), in_collective(1, "broadcast", 9)])[0] == (
        "the ranks wait in different collectives:"
    )


class Stuck(tiny.Tiny):
    """Slow for a while in its third step."""

    name = "stuck"

    def loss(self, model, batch, rng):  # type: ignore[no-untyped-def]
        if self.calls == 2:
            time.sleep(6)
        return super().loss(model, batch, rng)


def test_a_library_call_is_reported_but_not_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = fit(Stuck, n_steps=4, hang_timeout=2, out=str(tmp_path / "run"), device="cpu")
    assert outcome.step == 4
    said = capfd.readouterr().err
    assert said.count("the run hangs") == 1 and "rank 0 is stuck in step 3" in said and "time.sleep(6)" in said
    assert "in loss" in (tmp_path / "run/hang.txt").read_text()


def test_without_a_time_out_nothing_is_watched(tmp_path: Path) -> None:
    def watched() -> bool:
        return any(thread.name == "lockstep-hang-watch" for thread in threading.enumerate())

    with HangWatch(World(), tmp_path, 0, 600):
        assert not watched()
    with HangWatch(World(), tmp_path, 60, 600):
        assert watched()
    assert not watched()


def times(own: float, data: float = 0.0) -> list[StepTime]:
    return [StepTime(own, data)] * 9 + [StepTime(own + 5, data)]  # one hiccup is no straggler


def test_the_slowest_rank_is_a_straggler_from_a_fifth_more_time_on() -> None:
    found = find_straggler([times(0.1), times(0.15), times(0.1)], 2.0)
    assert found is not None and (found.rank, found.by_data) == (1, False)
    assert found.seconds == pytest.approx(0.05) and found.share == pytest.approx(0.25)
    assert find_straggler([times(0.1), times(0.119), times(0.1)], 2.0) is None
    assert find_straggler([times(0.1), times(0.15), times(0.1)], 100.0) is None  # too little of all time
    assert find_straggler([times(0.1)], 2.0) is None


def test_a_slow_loader_is_the_cause_even_where_the_others_wait_for_it_within_the_step() -> None:
    found = find_straggler([times(0.1), times(0.1, data=0.05)], 1.5)
    assert found is not None and (found.rank, found.by_data) == (1, True)


def test_a_straggler_is_said_once_when_it_is_slow_for_the_second_time() -> None:
    log, slow, even = Stragglers(), [times(0.1), times(0.2)], [times(0.1), times(0.1)]
    said = [log.check(ranks, 2.0)[1] is not None for ranks in (slow, slow, slow, even, slow, slow[::-1], slow[::-1])]
    assert said == [False, True, False, False, False, False, True]
    assert log.check(slow, 2.0)[0] == {"straggler": 1, "straggler_lost_share": pytest.approx(0.5)}
