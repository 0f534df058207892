"""Events are written as lines and read back; the verdict has one sentence, whoever shows it."""

import json
from dataclasses import MISSING, fields
from io import StringIO
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console

from lockstep.audit.catalog import Finding, finding
from lockstep.audit.events import KINDS, Collective, End, Event, PassEnd, ProbeFailed, Return, Step, Weights
from lockstep.audit.model import Rank, Trace, read_ranks
from lockstep.audit.recorder import Recorder, decode, encode
from lockstep.audit.report import as_html, as_json, show
from lockstep.audit.source import Site
from lockstep.audit.verdict import Verdict

VALUES: dict[Any, Any] = {int: 3, float: 0.5, bool: True, str: "x", list[int]: [1, 2], list[str]: ["a"]}
VALUES |= {list[float]: [0.1], dict[str, int]: {"w": 2**63 - 1}, dict[str, str]: {"A": "b"}}


def an_event(kind: type[Event]) -> Event:
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return kind(**{name: VALUES.get(hints[name], "done") for name in needed}, t=1.5, at=Site("train.py", 7))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_event_is_read_as_it_was_written(kind: type[Event]) -> None:
    event = an_event(kind)
    assert decode(encode(event)) == [event]


def test_a_cut_line_and_what_is_not_known_are_skipped() -> None:
    step = Step(0, 1, [0.1], t=1.0)
    later = json.dumps([*json.loads(encode(step)), "of a field of a later version"])
    assert decode(f'{encode(step)}\n{later}\n["Later", 1.0]\n{{}}\n[]\n{encode(step)[:30]}') == [step] * 2


def test_a_recorder_adds_the_time_and_the_line_of_the_script(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1)
    recorder.write(Collective("barrier"))
    recorder.write(Return(at=Site("train.py", 7)))
    entered, left = read_ranks(tmp_path, 2, [0, 0])[1].events
    assert isinstance(entered, Collective) and entered.at and entered.at.file == __file__
    assert left.at == Site("train.py", 7) and 0 < entered.t <= left.t


def test_calls_within_calls_are_left_in_turn() -> None:
    barrier, reduce = Collective("barrier", t=1.0), Collective("all_reduce", t=2.0)
    rank = Rank(0, [barrier, reduce, Return(t=3.0)], [], None)
    assert [(call.name, call.end) for call in rank.calls] == [("all_reduce", 3.0), ("barrier", None)]
    assert rank.open_call and rank.open_call.event is barrier


# -- one sentence -----------------------------------------------------------------------------------------------------
def a_trace(*steps: int, **ended: bool) -> Trace:
    ranks = []
    for number, count in enumerate(steps):
        events: list[Event] = [Step(0, n + 1, [0.1]) for n in range(count)]
        ranks.append(Rank(number, [*events, PassEnd(0, 1), End(0)], [], 0))
    return Trace(ranks, **ended)


ERROR, NOTE = finding("unsynchronised", "they differ"), finding("waits", "it waits")
SENTENCES: list[tuple[Trace, list[Finding], str]] = [
    (a_trace(3, 3), [], "nothing found: the ranks train one model on all of the data (2 ranks, 3 steps)"),
    (a_trace(1), [], "nothing found (1 rank, 1 step)"),
    (a_trace(0, 0), [], "nothing found, but no step was watched (2 ranks, 0 steps)"),
    (a_trace(3, 0), [], "nothing found, but no step was watched on rank 1 (2 ranks, 0 to 3 steps)"),
    (a_trace(3, 3), [ERROR, NOTE, NOTE], "1 error, 2 notes (2 ranks, 3 steps)"),
    (a_trace(3, 2, hung=True), [ERROR], "1 error; the ranks hang (2 ranks, 2 to 3 steps)"),
]


def blind() -> Trace:
    trace = a_trace(2, 2)
    trace.ranks[1].events.append(ProbeFailed("Training._inputs", "ValueError: x"))
    return trace


SENTENCES.append((blind(), [], "nothing found, but 1 probe failed, see the notes (2 ranks, 2 steps)"))


@pytest.mark.parametrize(("trace", "findings", "sentence"), SENTENCES, ids=[s for *_, s in SENTENCES])
def test_terminal_json_and_page_have_the_same_sentence(trace: Trace, findings: list[Finding], sentence: str) -> None:
    verdict = Verdict(["train.py"], trace, findings, [])
    console = Console(file=StringIO(), width=200)
    show(verdict, console)
    end = [sentence, verdict.consequence] if findings else [sentence]
    assert console.file.getvalue().splitlines()[-len(end) :] == end  # type: ignore[attr-defined]
    assert json.loads(as_json(verdict))["verdict"] == sentence
    assert f"<h1>{sentence}</h1>" in as_html(verdict)


def test_events_of_a_kind_are_those_of_all_ranks_with_the_same_key() -> None:
    ranks = [Rank(r, [Weights(0, n, {"w": r}) for n in range(r, 4)], [], 0) for r in range(2)]
    found = Trace(ranks).by_key(Weights, lambda w: w.n or None)
    assert list(found) == [1, 2, 3] and [w.checksums["w"] for w in found[2]] == [0, 1]
