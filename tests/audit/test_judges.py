"""Judges, on events made by hand: what no script of the zoo shows."""

from pathlib import Path

from lockstep.audit.catalog import CONSEQUENCES, KINDS, Finding
from lockstep.audit.events import Backward, Collective, End, Event, Print, Return, Step, Weights
from lockstep.audit.judges import judge
from lockstep.audit.model import Rank, Trace
from lockstep.audit.source import Site


def trace(*ranks: list[Event], hung: bool = False) -> Trace:
    """A trace of ranks with these events, one a second where they have no time of their own."""
    for events in ranks:
        for second, event in enumerate(events):
            event.t = event.t or float(second)
    return Trace([Rank(number, events, [], 0) for number, events in enumerate(ranks)], hung)


def names(found: list[Finding]) -> list[str]:
    return [finding.kind.name for finding in found]


def barrier(line: int) -> list[Event]:
    return [Collective("barrier", at=Site("train.py", line)), Return()]


def failed(seconds: float, line: int = 1, error: str = "ValueError: no data", file: str = "train.py") -> End:
    return End(1, error, t=seconds, at=Site(file, line))


def test_the_first_crash_is_the_headline() -> None:
    (found,) = judge(trace([failed(9.0)], [failed(3.0, line=7)], [failed(5.0)]))
    assert found.what.startswith("rank 1 failed") and found.at == Site("train.py", 7)


def test_a_crash_is_left_out_only_for_another_error() -> None:
    causes = {name for name, others in CONSEQUENCES.items() if "crashed" in others}
    assert causes and all(KINDS[name].severity == "error" for name in causes)


def test_a_script_that_compares_the_number_of_ranks_is_told_the_flag(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("world = 2\nif world != 8:\n    raise SystemExit('no')\nassert dist.get_world_size() == 4\n")
    for line, wanted in ((3, 8), (4, 4)):
        (found,) = judge(trace(*([failed(1.0, line, file=str(script))] for _ in range(2))))
        assert found.evidence == (f"it asks for {wanted} ranks: lockstep audit --nproc {wanted}",)
    mesh = "RuntimeError: Mesh should not be bigger than default world size 2, but found 6 ranks!"
    assert judge(trace([failed(1.0, error=mesh)], [failed(1.0, error=mesh)]))[0].evidence[0].endswith("--nproc 6")
    (found,) = judge(trace([failed(1.0)], [failed(1.0)]))
    assert not found.evidence


def test_ranks_part_at_the_first_call_that_only_one_of_them_makes() -> None:
    """Line 5 is called by rank 0 alone; what differs in kind comes much later."""
    extra = [*barrier(5), *barrier(9), *barrier(9), Collective("all_reduce", at=Site("train.py", 12))]
    plain = [*barrier(9), *barrier(9), *barrier(12), Return()]
    (found,) = judge(trace(extra, plain, hung=True))
    assert found.kind.name == "collective-mismatch" and found.at == Site("train.py", 5)
    assert "barrier at train.py:9" in found.evidence[0]


def test_lines_of_two_branches_are_no_extra_call() -> None:
    leader = [*barrier(5), *barrier(9), Collective("all_reduce", at=Site("train.py", 12))]
    others = [*barrier(7), *barrier(9), Collective("broadcast", at=Site("train.py", 14))]
    (found,) = judge(trace(leader, others, hung=True))
    assert found.at in (Site("train.py", 12), Site("train.py", 14))


def test_a_call_after_fewer_backward_passes_is_no_extra_call() -> None:
    early = [Backward(), Return(), *barrier(9)]
    late = [Backward(), Return(), Backward(), Return(), *barrier(5)]
    assert names(judge(trace(early, late, hung=True))) == ["uneven-steps"]


def test_prints_are_reported_at_the_line_of_most_steps() -> None:
    def rank() -> list[Event]:
        steps = [[Step(0, n, [0.1], prints=2), Print(at=Site("train.py", 8 if n == 3 else 20))] for n in range(1, 7)]
        return [Print(at=Site("train.py", 2)), *(event for step in steps for event in step)]

    found = [f for f in judge(trace(rank(), rank())) if f.kind.name == "all-ranks-log"]
    assert [f.at for f in found] == [Site("train.py", 20)]


def weights(rank: int, *after: tuple[int, bool, bool]) -> list[Event]:
    """Checksums after steps: the step, whether the ranks agree, whether they seem to have averaged them."""
    return [Weights(0, n, {"w": 0 if agree else rank}, averaged) for n, agree, averaged in after]


def test_only_weights_that_differed_are_averaged_on_purpose() -> None:
    local_sgd = ((1, False, False), (2, False, False), (4, True, True))
    assert trace(*(weights(r, *local_sgd) for r in range(2))).averaging_steps == [4]
    bug = ((1, True, False), (2, True, True), (5, False, False))  # something else was gathered after step 2
    assert trace(*(weights(r, *bug) for r in range(2))).averaging_steps == []
