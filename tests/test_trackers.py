"""What the trackers write, and that none of them can stop a training."""

import builtins
import errno
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep.plots import panels
from lockstep.trackers import Console, Curves, JsonLines, TensorBoard, Tracker, Trackers, Wandb

VALUES = {"loss": 0.51321, "lr": 1e-4, "samples_per_second": 812.3, "grad_norm": 1.5}


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Notes(Tracker):
    """Keeps what it gets; raises where told to."""

    def __init__(self, error: Exception | None = None, last_word: str | None = None):
        self.error, self.last_word = error, last_word
        self.calls: list[tuple[Any, ...]] = []

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.note("log", step, dict(values))

    def media(self, step: int, name: str, path: Path) -> None:
        self.note("media", step, name, path)

    def message(self, text: str) -> None:
        self.note("message", text)

    def advance(self, step: int) -> None:
        self.note("advance", step)

    def close(self) -> str | None:
        self.note("close")
        return self.last_word


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in lines_of(path)]


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Path]:
    black, red = Image.new("RGB", (8, 6)), Image.new("RGB", (8, 6), "red")
    paths = {"png": tmp_path / "picture.png", "gif": tmp_path / "picture.gif"}
    red.save(paths["png"])
    black.save(paths["gif"], save_all=True, append_images=[red])
    return paths


# The console


def plain(total: int = 20_000, start: int = 0) -> tuple[Console, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return Console(total, start, terminal=False, file=file, clock=clock), file, clock


def test_a_plain_line_has_step_loss_lr_speed_and_time_left() -> None:
    console, file, clock = plain()
    clock.now += 3.75
    console.log(100, VALUES)
    assert file.getvalue() == "step 100/20000  loss 0.5132  lr 1.0e-04  812 samples/s  left 0:12:26\n"


def test_a_plain_line_shows_validation_values_and_leaves_out_what_is_not_there() -> None:
    console, file, _ = plain(total=50)
    console.log(0, {"val/loss": 0.25, "val/mean iou": 3e-5, "grad_norm": 1.0})
    assert file.getvalue() == "step 0/50  val/loss 0.2500  val/mean iou 3.000e-05\n"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": float("nan")}, "loss nan"),
        ({"loss": float("inf")}, "loss inf"),
        ({"loss": 0.0}, "loss 0.0000"),
        ({"loss": -1234.5}, "loss -1234.5000"),
        ({"samples_per_second": 0.416}, "0.42 samples/s"),
        ({"samples_per_second": 123456.7}, "123457 samples/s"),
    ],
)
def test_numbers_of_any_size_can_be_read(values: dict[str, float], text: str) -> None:
    console, file, _ = plain(total=50)
    console.log(0, values)
    assert file.getvalue() == f"step 0/50  {text}\n"


def test_messages_are_printed_as_they_are() -> None:
    console, file, _ = plain()
    text = "[bold] :smile: a message " + "that is longer than a line of eighty columns " * 5
    console.message(text)
    assert file.getvalue() == text + "\n"


def left(file: io.StringIO) -> str:
    return file.getvalue().splitlines()[-1].partition("left ")[2]


def test_time_left_leaves_out_the_first_interval_as_soon_as_there_is_another() -> None:
    console, file, clock = plain(total=1000)
    clock.now += 60  # compilation
    console.log(100, VALUES)
    assert left(file) == "0:09:00"
    clock.now += 10
    console.log(200, VALUES)
    assert left(file) == "0:01:20"
    clock.now += 30
    console.log(300, VALUES)
    assert left(file) == "0:02:20"  # 40 s for 200 steps: the whole time since the first log
    clock.now += 500
    console.log(300, {"val/loss": 1.0})
    assert left(file) == "0:02:20"  # an evaluation is no step; its time counts from the next one on


def test_time_left_does_not_count_the_steps_before_a_resume() -> None:
    console, file, clock = plain(total=1000, start=900)
    console.log(900, {"val/loss": 1.0})
    assert "left" not in file.getvalue()
    clock.now += 10
    console.log(910, VALUES)
    assert left(file) == "0:01:30"


def test_time_left_can_be_days_and_ends_at_zero() -> None:
    console, file, clock = plain(total=1_000_000)
    clock.now += 1
    console.log(1, VALUES)
    assert left(file) == "277:46:39"
    console.log(1_000_000, VALUES)
    assert left(file) == "0:00:00"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return io.StringIO()


def test_a_terminal_gets_a_bar_with_all_numbers(screen: io.StringIO) -> None:
    clock = Clock()
    console = Console(200, terminal=True, file=screen, clock=clock)
    clock.now += 10
    console.log(50, VALUES | {"val/loss": 0.25})
    console.advance(100)
    console.close()
    last = screen.getvalue().rpartition("step 100/200")[2]
    for text in ("━", "50%", "left 0:00:20", "loss 0.5132", "lr 1.0e-04", "812 samples/s", "val/loss 0.2500"):
        assert text in last
    assert "step 50/200  loss" not in screen.getvalue()


def test_a_message_stands_whole_above_the_bar(screen: io.StringIO) -> None:
    console = Console(200, terminal=True, file=screen)
    text = "[x] a message that is longer than the eighty columns which this terminal has, so it runs over"
    console.message(text)
    console.close()
    assert f"\n{text}\n" in screen.getvalue().replace("\r", "\n").replace("\x1b[2K", "").replace("\x1b[1A", "")
    assert screen.getvalue().rindex("step 0/200") > screen.getvalue().index(text)


def test_a_message_after_close_is_still_printed(screen: io.StringIO) -> None:
    console = Console(200, terminal=True, file=screen)
    console.close()
    console.message("the last word")
    assert screen.getvalue().endswith("the last word\n")


def test_a_bar_of_no_steps_can_be_drawn(screen: io.StringIO) -> None:
    Console(0, terminal=True, file=screen).close()
    assert "step 0/0" in screen.getvalue()


def test_forked_workers_print_past_rich_and_close_gives_the_streams_back(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(200, terminal=True)
    assert sys.stdout is not screen
    child = os.fork()
    if child == 0:
        os._exit(0 if sys.stdout is screen else 1)
    assert os.waitpid(child, 0)[1] == 0
    print("printed by someone else")
    console.close()
    assert sys.stdout is screen
    assert "printed by someone else\n" in screen.getvalue()


def test_what_is_no_terminal_gets_plain_lines_even_if_color_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    Console(10, file=file).log(5, {"loss": 1.0})
    assert file.getvalue().startswith("step 5/10  loss 1.0000")
    assert "\x1b" not in file.getvalue()


# metrics.jsonl


def test_every_line_is_json_and_on_disk_at_once(tmp_path: Path) -> None:
    path, clock = tmp_path / "new folder" / "metrics.jsonl", Clock()
    tracker = JsonLines(path, clock=clock)
    tracker.log(10, {"loss": 0.5, "val/loss": 1})
    assert lines_of(path) == [{"step": 10, "time": 1000.0, "loss": 0.5, "val/loss": 1}]
    tracker.log(20, {"loss": float("nan"), "grad_norm": float("inf"), "lr": float("-inf")})
    assert lines_of(path)[1] == {"step": 20, "time": 1000.0, "loss": None, "grad_norm": None, "lr": None}
    assert tracker.close() is None


def test_a_resumed_run_goes_on_in_the_file_and_each_step_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in (10, 20, 30, 40):
        first.log(step, {"loss": 1.0})
    first.close()
    second = JsonLines(path, resume_step=20)
    assert steps_of(path) == [10, 20]
    second.log(30, {"loss": 2.0})
    second.close()
    assert [(line["step"], line["loss"]) for line in lines_of(path)] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    JsonLines(path, resume_step=None).close()
    assert steps_of(path) == [10, 20, 30]
    JsonLines(path, resume_step=-1).close()
    assert steps_of(path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 30, "lo', b'{"step": 30}', b"\0\0\0\0\n", b'"step"\n', b"\xff\n", b"\n"])
def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10}\n{"step": 20}\n' + torn)
    tracker = JsonLines(path)
    tracker.log(30, {"loss": 1.0})
    tracker.close()
    assert steps_of(path) == [10, 20, 30]


@pytest.fixture
def disk() -> Iterator[Callable[[int], None]]:
    """Say how large a file may become: the system then writes a part of a line, and fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_line_is_lost_or_torn_when_the_disk_was_full_for_a_while(
    tmp_path: Path, disk: Callable[[int], None]
) -> None:
    path, warnings = tmp_path / "metrics.jsonl", list[str]()
    trackers = Trackers({"metrics.jsonl": lambda: JsonLines(path)}, warnings.append)
    trackers.log(10, VALUES)
    disk(path.stat().st_size + 30)
    trackers.log(20, VALUES)
    trackers.log(30, VALUES)
    disk(resource.RLIM_INFINITY)
    size = path.stat().st_size
    trackers.log(40, VALUES)
    trackers.close()
    assert size == len(path.read_bytes().splitlines(keepends=True)[0]) + 30
    assert steps_of(path) == [10, 20, 30, 40]
    assert len(warnings) == 1
    assert warnings[0].startswith("metrics.jsonl cannot be written, and is tried again: ")
    assert os.strerror(errno.EFBIG) in warnings[0]


def test_a_folder_that_comes_later_is_found_and_lines_that_never_got_out_are_named(tmp_path: Path) -> None:
    folder, warnings, notes = tmp_path / "folder", list[str](), Notes()
    folder.write_text("a file in the way")
    path = folder / "metrics.jsonl"
    trackers = Trackers({"metrics.jsonl": lambda: JsonLines(path), "notes": lambda: notes}, warnings.append)
    assert warnings == []
    trackers.log(10, VALUES)
    assert len(warnings) == 1
    folder.unlink()
    trackers.log(20, VALUES)
    assert steps_of(path) == [10, 20]
    trackers.close()

    folder = tmp_path / "other"
    folder.write_text("a file in the way")
    never = JsonLines(folder / "metrics.jsonl")
    with pytest.raises(OSError, match="exists"):
        never.log(10, VALUES)
    assert "lacks its last lines" in (never.close() or "")


# TensorBoard


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_back_scalars_and_pictures(tmp_path: Path, pictures: dict[str, Path]) -> None:
    tracker = TensorBoard(tmp_path / "tensorboard")
    tracker.log(10, VALUES)
    tracker.log(20, {"loss": float("nan")})
    for kind, path in pictures.items():
        tracker.media(20, kind, path)
    tracker.close()
    read = events(tmp_path / "tensorboard")
    assert set(read.Tags()["scalars"]) == set(VALUES)
    assert [(event.step, event.value) for event in read.Scalars("lr")] == [(10, pytest.approx(1e-4))]
    assert [event.step for event in read.Scalars("loss")] == [10, 20]
    for kind, path in pictures.items():
        (image,) = read.Images(kind)
        assert (image.step, image.width, image.height) == (20, 8, 6)
        assert image.encoded_image_string == path.read_bytes()


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"loss": 1.0})
    first.close()
    second = TensorBoard(tmp_path, resume_step=10)
    second.log(20, {"loss": 2.0})
    second.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("loss")] == [(10, 1.0), (20, 2.0)]


# Weights & Biases


@pytest.fixture(autouse=True)
def own_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))  # nobody's login


def wandb_of(folder: Path) -> Wandb:
    return Wandb(folder, project="project", name="name", config={"lr": 1e-4}, run_id="some-id")


def test_wandb_is_offline_by_default_quiet_and_says_how_to_sync(
    tmp_path: Path, pictures: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    notes, warnings = Notes(), list[str]()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook
    for _ in range(2):  # the second time goes on as the same run
        trackers = Trackers({"wandb": lambda: wandb_of(tmp_path / "run"), "notes": lambda: notes}, warnings.append)
        trackers.log(10, VALUES)
        trackers.log(20, {"loss": float("nan")})
        for kind, path in pictures.items():
            trackers.media(20, kind, path)
        assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook)
        trackers.close()
    assert warnings == []
    hints = [call[1] for call in notes.calls if call[0] == "message"]
    runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*-some-id"))
    assert hints[-1].split()[:2] == ["wandb", "sync"]
    assert hints[-1].split()[2:] == [str(run) for run in runs]
    assert all((run / "run-some-id.wandb").stat().st_size > 0 for run in runs)
    assert {file.suffix for run in runs for file in run.rglob("files/media/**/*.*")} == {".png", ".gif"}
    assert capfd.readouterr() == ("", "")
    assert "WANDB_SERVICE" not in os.environ  # its process was told to go


def test_the_numbers_are_in_the_offline_run(tmp_path: Path) -> None:
    tracker = wandb_of(tmp_path)
    tracker.log(1234, {"loss": 0.51321})
    tracker.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-some-id.wandb")
    data = file.read_bytes()
    assert b"0.51321" in data
    assert b"1234" in data


def test_wandb_disabled_by_the_environment_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = wandb_of(tmp_path / "run")
    tracker.log(10, VALUES)
    assert tracker.close() is None
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(("environment", "mode"), [(None, "offline"), ("offline", "offline"), ("online", "online")])
def test_the_mode_of_the_environment_reaches_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str | None, mode: str
) -> None:
    seen = {}

    def init(**arguments: Any) -> None:
        seen.update(arguments)
        raise OSError("far enough")

    monkeypatch.setattr("wandb.init", init)
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    with pytest.raises(OSError, match="far enough"):
        wandb_of(tmp_path)
    assert seen["mode"] == mode
    assert (seen["project"], seen["name"], seen["id"], seen["resume"]) == ("project", "name", "some-id", "allow")
    assert (seen["dir"], seen["config"]) == (str(tmp_path), {"lr": 1e-4})
    assert seen["settings"].init_timeout == 30
    assert seen["settings"].finish_timeout == 300


def test_wandb_online_without_a_network_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(Wandb, "limits", Wandb.limits | {"init_timeout": 1.0})
    warnings, notes = list[str](), Notes()
    trackers = Trackers({"wandb": lambda: wandb_of(tmp_path), "notes": lambda: notes}, warnings.append)
    trackers.log(10, VALUES)
    trackers.close()
    (warning,) = warnings
    assert warning.startswith("wandb is off: ")
    assert "\n" not in warning
    assert notes.calls == [("log", 10, VALUES), ("close",)]
    assert "WANDB_SERVICE" not in os.environ


def test_wandb_without_a_login_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    warnings = list[str]()
    Trackers({"wandb": lambda: wandb_of(tmp_path)}, warnings.append).close()
    assert len(warnings) == 1
    assert "wandb login" in warnings[0]


def test_uploads_that_take_too_long_are_left_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = wandb_of(tmp_path)
    finish = tracker._run.finish

    def late(exit_code: int) -> None:
        finish(exit_code)
        raise TimeoutError

    monkeypatch.setattr(tracker._run, "finish", late)
    assert (tracker.close() or "").startswith("wandb sync ")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["tracker.close()", "pass", "raise ValueError('on purpose')"])
def test_no_process_of_wandb_stays_behind(tmp_path: Path, end: str) -> None:
    script = f"""
from pathlib import Path
from lockstep.trackers import Wandb
tracker = Wandb(Path({str(tmp_path)!r}), "project", "name", {{}})
tracker.log(1, {{"loss": 1.0}})
{end}
"""
    # A process left behind would hold the pipes open, and `run` would not return.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == ""
    assert done.stderr.count("Traceback") == int("raise" in end)
    assert done.returncode == int("raise" in end)


def test_a_run_that_ends_in_an_exception_is_marked_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trackers = Trackers({"wandb": lambda: wandb_of(tmp_path)}, pytest.fail)
    (tracker,) = trackers._trackers.values()
    assert isinstance(tracker, Wandb)
    monkeypatch.setattr(tracker._run, "finish", lambda exit_code: codes.append(exit_code))
    with pytest.raises(ValueError, match="on purpose"):
        try:
            raise ValueError("on purpose")
        finally:
            trackers.close()
    assert codes == [1]


# All of them


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [("wandb", "wandb", wandb_of), ("torch.utils.tensorboard", "tensorboard", TensorBoard)],
)
def test_a_missing_package_is_named_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, make: Callable[[Path], Tracker]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    warnings, notes = list[str](), Notes()
    trackers = Trackers({extra: lambda: make(tmp_path), "notes": lambda: notes}, warnings.append)
    trackers.log(10, VALUES)
    trackers.close()
    assert warnings == [f"{extra} is off: No module named {package!r}; pip install 'lockstep-train[{extra}]'"]
    assert notes.calls == [("log", 10, VALUES), ("close",)]


def test_a_failing_tracker_is_named_once_closed_and_dropped_and_the_others_go_on() -> None:
    bad, good, warnings = Notes(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), Notes(), list[str]()
    trackers = Trackers({"bad": lambda: bad, "good": lambda: good}, warnings.append)
    trackers.log(10, VALUES)
    trackers.log(20, VALUES)
    trackers.media(20, "samples", Path("samples.png"))
    trackers.advance(21)
    trackers.message("text")
    trackers.close()
    assert warnings == [f"bad is off: [Errno {errno.ENOSPC}] No space left on device"]
    assert bad.calls == [("log", 10, VALUES), ("close",)]
    assert good.calls == [
        ("log", 10, VALUES),
        ("log", 20, VALUES),
        ("media", 20, "samples", Path("samples.png")),
        ("advance", 21),
        ("message", "text"),
        ("close",),
    ]


def test_an_error_without_words_is_named_by_its_type() -> None:
    warnings = list[str]()
    Trackers({"bad": lambda: Notes(ZeroDivisionError())}, warnings.append).advance(1)
    assert warnings == ["bad is off: ZeroDivisionError"]


def test_what_stops_the_program_is_not_held_up() -> None:
    def interrupted() -> Tracker:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"bad": interrupted}, pytest.fail)


def test_last_words_reach_the_console_wherever_it_stands_and_only_once() -> None:
    file = io.StringIO()
    for order in (("console", "other"), ("other", "console")):
        makers: dict[str, Callable[[], Tracker]] = {
            "console": lambda: Console(10, file=file),
            "other": lambda: Notes(last_word="the last word"),
        }
        trackers = Trackers({name: makers[name] for name in order}, pytest.fail)
        trackers.close()
        trackers.close()
        trackers.log(1, VALUES)
    assert file.getvalue() == "the last word\n" * 2


def test_without_trackers_everything_can_be_called() -> None:
    trackers = Trackers({})
    trackers.advance(1)
    trackers.log(1, VALUES)
    trackers.media(1, "samples", Path("there is no such file"))
    trackers.message("text")
    trackers.close()


def test_curves_are_drawn_from_what_was_logged(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    both = Trackers({"lines": lambda: lines, "curves": lambda: Curves(tmp_path, lambda name: True)})
    for step in range(1, 40):
        both.log(step, {"loss": 1 / step, "lr": 0.1, "epoch": step / 10})
    both.log(39, {"val/loss": 0.5, "val/accuracy": math.nan})
    both.close()
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > picture.height > 200  # loss and lr, side by side


def test_curves_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said: list[str] = []
    make = lambda: Curves(tmp_path, lambda name: True)  # noqa: E731
    Trackers({"curves.png": make}, said.append)
    assert len(said) == 1 and "lockstep-train[plots]" in said[0]


def test_curves_draw_training_and_validation_together_only_if_they_are_one_quantity() -> None:
    names = ["loss", "dice", "lr", "val/loss", "val/dice", "val/miou"]
    assert panels(names, lambda name: name == "loss") == {
        "loss": {"training": "loss", "validation": "val/loss"},
        "dice (training)": {"training": "dice"},
        "lr": {"training": "lr"},
        "dice (validation)": {"validation": "val/dice"},
        "miou": {"validation": "val/miou"},
    }


def test_the_console_shows_what_a_recipe_logs() -> None:
    file = io.StringIO()
    console = Console(100, file=file, clock=Clock())
    console.log(10, {"loss": 0.5, "accuracy": 0.25, "lr": 1e-4, "grad_norm": 3.0, "epoch": 0.1, "watch_seconds": 0.0})
    assert file.getvalue() == "step 10/100  loss 0.5000  accuracy 0.2500  lr 1.0e-04  left 0:00:00\n"


@pytest.mark.parametrize("name", ["samples.txt", "samples.csv", "samples.npy", "samples.pdb", "samples"])
def test_tensorboard_takes_samples_of_any_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"some text \xff")
    warnings = list[str]()
    trackers = Trackers({"TensorBoard": lambda: TensorBoard(tmp_path / "tensorboard")}, warnings.append)
    trackers.media(20, "samples", tmp_path / name)
    trackers.log(20, VALUES)
    trackers.close()
    read = events(tmp_path / "tensorboard")
    assert warnings == [] and set(read.Tags()["scalars"]) == set(VALUES)
    shown = [read.Tensors(tag)[0].tensor_proto.string_val[0] for tag in read.Tags()["tensors"]]
    assert [text.startswith(b"some text") for text in shown] == [True] * (name.endswith((".txt", ".csv")))
