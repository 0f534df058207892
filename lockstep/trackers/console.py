"""The console: a progress bar on a terminal, one plain line for each log elsewhere."""

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ..files import printable
from ..plots import NOT_DRAWN
from .tracker import Tracker

ENGINE_VALUES = NOT_DRAWN | {"lr", "grad_norm", "samples_per_second"}
"""What the engine logs of every run; all else comes from the recipe."""


class Screen(rich.console.Console):
    """A console of rich that raises when nobody reads it any more (`| head`); rich's own would exit the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of the output is gone")


class Console(Tracker):
    """A progress bar on a terminal, one plain line for each `log` elsewhere."""

    STATUS_SECONDS = 5.0
    """Between two lines of `status` where there is no terminal."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        terminal: bool | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], str] = str,
    ):
        """`load()`: how busy the device is, in a few characters."""
        if terminal is None:  # rich would take FORCE_COLOR for a terminal too, and fill a log file with bars
            terminal = (file or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
        self._step, self._total, self._clock, self._load = start, total, clock, load
        self._status, self._status_at = "", -math.inf
        self._marks, self._shown = [(start, clock())], dict[str, float]()  # marks: at the start, first log, latest log
        self._screen = Screen(file=file, force_terminal=terminal)
        self._live = self._start(shared=file is None) if terminal else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        if step > self._marks[-1][0]:
            self._marks = [*self._marks[:2], (step, self._clock())]
        self._shown = self._shown | dict(values)  # replaced, not changed: the drawing thread may be reading it
        if self._live is None and (numbers := _numbers(values)):
            shown = [f"step {step}/{self._total}", *numbers, self._load(), self._left(step)]
            self.message("  ".join(filter(None, shown)))

    def message(self, text: str) -> None:
        self._screen.print(Text(printable(text)), soft_wrap=True)

    def status(self, text: str) -> None:
        """Show what the run does between steps: in place on a terminal, elsewhere as a line every few seconds."""
        self._status = text
        if self._live is None and self._clock() - self._status_at >= self.STATUS_SECONDS:
            self._status_at = self._clock()
            self.message(text)

    def advance(self, step: int) -> None:
        self._step, self._status, self._status_at = step, "", -math.inf  # no lock: rich's thread only reads

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _left(self, step: int) -> str:
        """Time to the end at the speed of this process: from its first log on, as compilation comes before that."""
        if len(self._marks) == 1:
            return ""
        (begun, then), (reached, now) = self._marks[-2:]
        minutes, seconds = divmod(round(max(self._total - step, 0) * (now - then) / (reached - begun)), 60)
        return f"left {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

    def _start(self, shared: bool) -> Live:
        # On a screen shared with others, what they print goes through rich, above the bar.
        plain = sys.stdout, sys.stderr
        live = Live(console=self._screen, get_renderable=self._draw, redirect_stdout=shared, redirect_stderr=shared)

        def forked() -> None:  # in a data worker: rich's lock may be held by its thread, which is not there
            if live.is_started and shared:
                sys.stdout, sys.stderr = plain

        os.register_at_fork(after_in_child=forked)
        live.start(refresh=True)
        return live

    def _draw(self) -> rich.console.Group:
        step, total = self._step, max(self._total, 1)
        bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        position, percent = f"step {step}/{self._total}", f"{100 * step // total}%  {self._left(step)}"
        bar.add_row(position, ProgressBar(total=total, completed=step), percent)
        return rich.console.Group(bar, Text(printable(self._status) or "  ".join(self._values())))

    def _values(self) -> list[str]:
        return [text for text in (*_numbers(self._shown), self._load()) if text]


def _numbers(values: Mapping[str, float]) -> list[str]:
    """Return what the console shows: the loss, a recipe's own values, and the engine's that matter to everyone."""
    others = (*ENGINE_VALUES, "loss")
    own = [n for n in values if n not in others and not n.startswith("val/") and not n.endswith("_grad_norm")]
    names = ["loss", *own, "lr", "samples_per_second", *(name for name in values if name.startswith("val/"))]
    return [_text(name, values[name]) for name in names if name in values]


def _text(name: str, value: float) -> str:
    if name == "lr" or name.endswith("_lr"):
        return f"{name} {value:.1e}"
    if name == "samples_per_second":
        return f"{value:.0f} samples/s" if value >= 10 else f"{value:.2g} samples/s"
    return f"{name} {value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{name} {value:.3e}"
