"""What values are logged to: the console, metrics.jsonl, TensorBoard, Weights & Biases.

    trackers = Trackers({"console": lambda: Console(20_000), ...}, warn)   on rank 0; Trackers({}) on the others
    every step:       trackers.advance(step)                               waits for nothing
    every log_every:  trackers.log(step, {"loss": 0.5, "lr": 1e-4, "samples_per_second": 812.0})
    sometimes:        trackers.media(step, "samples", path), trackers.message("a checkpoint is written")
    in a `finally`:   trackers.close()

No tracker can stop a run. One that fails, when it is made or later, is named with the reason, once, and dropped.
Only metrics.jsonl is tried again at every later log, as a full disk may be freed; until then its lines stay in memory.
"""

import errno
import html
import math
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO

import rich.console
from PIL import Image
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from .config import Run
from .files import StepLines, printable
from .plots import NOT_DRAWN, draw, finite, panels, read_metrics

ENGINE_VALUES = NOT_DRAWN | {"lr", "grad_norm", "samples_per_second"}
"""What the engine logs of every run; all else comes from the recipe."""
PICTURES = (".png", ".gif", ".jpg", ".jpeg")
TEXTS = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".fasta")
MAX_TEXT = 10_000
"""Characters of a text file that are shown."""


def _text_of(path: Path) -> str | None:
    """Return the beginning of a text file; None for another kind of file."""
    if path.suffix.lower() not in TEXTS:
        return None
    with path.open(errors="replace") as file:
        return file.read(MAX_TEXT)


class Tracker(ABC):
    """One target of logged values. Any method may raise: `Trackers` catches it.

    `media` gets a file of any kind, and shows it if it is a picture or text; `advance` gets every step (it must cost
    nothing), `status` what the run does between steps; `close` may return a last message.
    """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def media(self, step: int, name: str, path: Path) -> None: ...
    def message(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...
    def advance(self, step: int) -> None: ...
    def close(self) -> str | None: ...


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
    own = [name for name in values if name not in (*ENGINE_VALUES, "loss") and not name.startswith("val/")]
    names = ["loss", *own, "lr", "samples_per_second", *(name for name in values if name.startswith("val/"))]
    return [_text(name, values[name]) for name in names if name in values]


def _text(name: str, value: float) -> str:
    if name == "lr":
        return f"lr {value:.1e}"
    if name == "samples_per_second":
        return f"{value:.0f} samples/s" if value >= 10 else f"{value:.2g} samples/s"
    return f"{name} {value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{name} {value:.3e}"


class JsonLines(Tracker):
    """One JSON object a line: {"step": ..., "time": seconds since 1970, **values}, handed to the disk at once.

    What is not finite is written as null: JSON has no word for it. Lines of steps after `resume_step`, left by a run
    that got further than its last checkpoint, are removed (with -1, all).
    """

    def __init__(self, path: Path, resume_step: int | None = None, clock: Callable[[], float] = time.time):
        self._lines, self._clock = StepLines(path, math.inf if resume_step is None else resume_step), clock

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.append({"step": step, "time": round(self._clock(), 3), **finite})

    def close(self) -> str | None:
        complete = self._lines.close()
        return None if complete else f"{self._lines.path} lacks its last lines: they could not be written"


class Curves(Tracker):
    """When all is over, a picture of metrics.jsonl: one panel for each quantity.

    Training and validation share a panel only where they are the same quantity, as `same_in_validation(name)` says.
    """

    def __init__(self, folder: Path, same_in_validation: Callable[[str], bool]):
        self._folder, self._same = folder, same_in_validation
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[plots]', or --no_curves") from error

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        series = finite(read_metrics(self._folder / "metrics.jsonl"))
        if all(len(points) < 2 for points in series.values()):  # of a point there is no curve
            return
        lines = panels(series, self._same)
        draw({k: {label: series[n] for label, n in v.items()} for k, v in lines.items()}, self._folder / "curves.png")


class Report(Tracker):
    """When all is over, `report.html`: the page that `lockstep report` writes."""

    def __init__(self, folder: Path, same_in_validation: Callable[[str], bool]):
        self._folder, self._same = folder, same_in_validation

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        from .report.html import write_page  # its libraries are needed once, at the end

        write_page([self._folder], self._folder / "report.html", self._same)


class TensorBoard(Tracker):
    """Event files in `folder`. With `resume_step`, TensorBoard hides what earlier files hold of later steps."""

    def __init__(self, folder: Path, resume_step: int | None = None):
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[tensorboard]'") from error
        self._summary = Summary
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def media(self, step: int, name: str, path: Path) -> None:
        if (text := _text_of(path)) is not None:
            self._writer.add_text(name, text, step)
        if path.suffix.lower() not in PICTURES:
            return
        # The file's own bytes rather than `add_image`: nothing is encoded again, and a GIF moves.
        with Image.open(path) as image:
            width, height = image.size
        data = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
        self._writer.file_writer.add_summary(self._summary(value=[self._summary.Value(tag=name, image=data)]), step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """A run in `folder`/wandb, offline unless WANDB_MODE says otherwise; an earlier part's `run_id` makes it go on."""

    limits: ClassVar[dict[str, Any]] = {"init_timeout": 30.0, "finish_timeout": 300.0, "finish_timeout_raises": True}

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any], run_id: str | None = None):
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry looks for a network, even offline
        try:  # names, not the module: a folder `wandb` in the working directory imports as an empty package
            from wandb import Html, Image, Settings, Video, init, setup, teardown
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[wandb]'") from error
        self._image, self._video, self._html, self._teardown = Image, Video, Html, teardown
        limits = {key: value for key, value in self.limits.items() if key in Settings.model_fields}  # 0.19 has fewer
        identity: dict[str, Any] = {"dir": str(folder), "project": project, "name": name, "id": run_id}
        folder.mkdir(parents=True, exist_ok=True)  # else wandb writes to the folder for temporary files
        hook = sys.excepthook
        try:
            setup(Settings(silent=True))  # of the process: with `init` alone it talks, and asks for a login
            settings = Settings(silent=True, console="off", **limits)
            self._run: Any = init(mode=mode, config=dict(config), resume="allow", settings=settings, **identity)
            # wandb's own step can only rise: what is logged again after a resume would be thrown away
            self._run.define_metric("*", step_metric="step")
        except BaseException:
            teardown()
            raise
        finally:
            sys.excepthook = hook  # wandb's own would print every traceback a second time

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def media(self, step: int, name: str, path: Path) -> None:
        if path.suffix.lower() in PICTURES:
            media = self._video if path.suffix.lower() == ".gif" else self._image
            self._run.log({"step": step, name: media(str(path))})
        elif (text := _text_of(path)) is not None:
            self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> str | None:
        here = Path(self._run.dir).parent  # wandb/offline-run-DATE_TIME-ID
        parts = here.parent.glob(here.name.split("run-")[0] + f"run-*-{self._run.id}")  # one for each resume
        try:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))  # an exception is on its way: it failed
            unsent = self._run.offline
        except TimeoutError:
            unsent = True
        finally:
            self._teardown()
        return "wandb sync " + shlex.join(map(str, sorted(parts))) if unsent else None


class Trackers:
    """All trackers as one: `trackers` says how to make each, `warn` gets one line for each that fails."""

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], warn: Callable[[str], None] = lambda text: None):
        self._warn, self._warned = warn, set[str]()
        self._trackers: dict[str, Tracker] = {}
        for name, make in trackers.items():
            try:
                self._trackers[name] = make()
            except Exception as error:
                self._failed(name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def media(self, step: int, name: str, path: Path) -> None:
        self._each(lambda tracker: tracker.media(step, name, path))

    def message(self, text: str) -> None:
        self._each(lambda tracker: tracker.message(text))

    def status(self, text: str) -> None:
        self._each(lambda tracker: tracker.status(text))

    def advance(self, step: int) -> None:
        self._each(lambda tracker: tracker.advance(step))

    def close(self) -> None:
        """Close all, then say their last words. A second call does nothing."""
        words: list[str | None] = []
        self._each(lambda tracker: words.append(tracker.close()))
        for text in filter(None, words):
            self.message(text)
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        again = isinstance(self._trackers.get(name), JsonLines)
        if name not in self._warned:
            self._warned.add(name)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"{name} {'cannot be written, and is tried again' if again else 'is off'}: {reason}")
        if not again:
            with suppress(Exception):  # of its close, or because it was never made
                self._trackers.pop(name).close()


def for_run(
    run: Run,
    folder: Path,
    console: Console,
    settings: Mapping[str, Any],
    resumed: int | None,
    same_in_validation: Callable[[str], bool],
) -> dict[str, Callable[[], Tracker]]:
    """Return, by name, how to make each tracker that a run's settings ask for.

    `resumed` is the step it resumes at; `same_in_validation(name)`: whether a value of training and of validation are
    the same quantity.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        "the console": lambda: console,
        "metrics.jsonl": lambda: JsonLines(folder / "metrics.jsonl", resumed),
    }
    if run.curves:
        makers["curves.png"] = lambda: Curves(folder, same_in_validation)
    if run.report:
        makers["report.html"] = lambda: Report(folder, same_in_validation)
    if run.tensorboard:
        events = Path(run.logdir) if run.logdir else folder / "tensorboard"
        makers["TensorBoard"] = lambda: TensorBoard(events, resumed)
    if run.use_wandb:
        name = run.wandb_name or folder.name
        run_id = "".join(c if c.isalnum() else "-" for c in str(folder))[-60:]  # the same when the run is resumed
        makers["W&B"] = lambda: Wandb(folder, run.wandb_project, name, settings, run_id)
    return makers
