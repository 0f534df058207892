"""Python stacks of this process: of every thread as text, of the training thread also as what it waits in."""

import sys
import sysconfig
import threading
import traceback
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_WORLD = str(Path(__file__).parents[1] / "distributed.py")
_HOOKS = str(Path(__file__).parents[1] / "companion.py")
"""Wraps the loaders of scripts: what it calls is called by the script."""
_COMPILER = ("_dynamo/convert_frame.py", "_inductor/graph.py", "_inductor/async_compile.py", "_inductor/codecache.py")
"""Files of torch that are on a stack while it compiles, and not when compiled code runs."""


class Line(NamedTuple):
    """A line of a stack."""

    file: str
    number: int
    function: str
    text: str

    @property
    def site(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"

    def __str__(self) -> str:
        return f"{self.site}: {self.text}" if self.text else self.site


def stack_of(thread: int) -> list[Line]:
    """Return the stack of a thread, innermost line last; empty if the thread has ended."""
    frame = sys._current_frames().get(thread)
    summaries = traceback.extract_stack(frame) if frame else []
    return [Line(s.filename, s.lineno or 0, s.name, s.line or "") for s in summaries]


def all_stacks(first: int) -> str:
    """Return the stacks of all threads but those that watch the run, as text; that of the thread `first` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {i: frame for i, frame in sys._current_frames().items() if not names.get(i, "").startswith("lockstep-")}
    order = sorted(frames, key=lambda i: (i != first, i))
    parts = (f"thread {names.get(i, i)}:\n{''.join(traceback.format_stack(frames[i]))}" for i in order)
    return "\n".join(parts)


def is_compiling() -> bool:
    """Return whether torch.compile is at work in any thread (a backward pass on a GPU has one of its own)."""
    files = tuple(str(Path(_TORCH, file)) for file in _COMPILER)
    return any(file in files for frame in sys._current_frames().values() for file in _files(frame))


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def waits_in(stack: list[Line]) -> tuple[str, Line] | None:
    """Return the collective in which a thread waits and the line that called it, or None if it is in none.

    Within `backward` a thread may wait for DDP's all-reduces, or still compute: that has no line of Python.
    """
    inner = next((i for i, line in enumerate(reversed(stack)) if not line.file.startswith(_TORCH)), len(stack))
    called, callers = stack[len(stack) - inner :], stack[: len(stack) - inner]
    if not callers:
        return None
    at = next((line for line in reversed(callers) if line.file != _WORLD), callers[-1])
    folders = (f"{_TORCH}/distributed/", f"{_TORCH}/nn/parallel/distributed.py")
    collectives = [line.function for line in called if line.file.startswith(folders) and line.function != "wrapper"]
    if collectives:
        return collectives[0], at
    if any(line.function == "backward" for line in called):
        return "backward", at
    return None


def own_line(stack: list[Line]) -> Line:
    """Return the innermost line of Lockstep or of the user's code, rather than of a library."""
    return next((line for line in reversed(stack) if not _is_library(line.file)), stack[-1])


@cache
def _is_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    folders = tuple({paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], _TORCH, "<"})
    return file == _HOOKS or (file.startswith(folders) and not file.startswith(_PACKAGE))
