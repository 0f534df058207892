"""More processes than cores: a warning, or a question on a terminal, before any is started."""

import io
import os
from functools import partial

import pytest

from lockstep import launch
from lockstep.audit import command
from lockstep.cores import check_cores


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_a_few_more_than_cores_are_started_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    check_cores(16)
    assert capsys.readouterr().err == ""


def test_far_more_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    check_cores(100)
    assert "100 processes on 2 core(s)" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "starts"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_on_a_terminal_the_user_is_asked(monkeypatch: pytest.MonkeyPatch, answer: str, starts: bool) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    if starts:
        check_cores(100)
        return
    audit = partial(command.examine, [__file__], command.Audit(100), [])
    for start in (partial(launch.start, 100, ["nothing"]), audit):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        with pytest.raises(ValueError, match="nothing was started; use --nproc 2 or fewer"):
            start()
