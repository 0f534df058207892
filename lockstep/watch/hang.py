"""A run that makes no progress is reported, rank by rank and line by line, and ended.

    with HangWatch(world, run_dir.path, hang_timeout=120, timeout=600):
        ...                                 the main thread writes what it does into world.activity

A thread of each rank looks at the rank's activity a few times per `hang_timeout` and publishes it in the store of the
process group. The run hangs when no rank makes progress any more and each has used up the time that its phase may
take; a rank that does not even publish (stopped, or the GIL is held) counts as one without progress. The lowest rank
that responds collects all stacks, writes them to `hang.txt`, prints who waits for whom, and all ranks exit.
"""

import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import activity
from ..distributed import HANG_STATUS, World, answer_within, first_to_fail, report_cut_off
from ..processes import is_running, this_process
from ..processes import state as process_state
from .board import Board
from .diagnosis import RankState, diagnose, report
from .idle import IdleClock
from .live import device_load, remove_live, write_live
from .stacks import Line, all_stacks, own_line, stack_of, waits_in

FILE = "hang.txt"
_LOOK_EVERY = 2.0
"""Seconds between two looks at the rank's activity, at most."""
_ANSWER = 5.0
"""Seconds that ranks have to send their stacks."""


class HangWatch:
    """Watches the thread that enters it, until it leaves. `ends_process`: exit after the report.

    `busy`: see `IdleClock`.
    """

    def __init__(
        self, world: World, folder: Path, hang_timeout: float, timeout: float, ends_process: bool = True,
        busy: Callable[[float], bool] = lambda _: False,
    ):  # fmt: skip
        self.world, self.ends_process = world, ends_process
        world.folder = folder
        self.hang_timeout, self.timeout = hang_timeout, timeout
        self._clock = IdleClock(world.activity, hang_timeout, busy)
        self._process = this_process()
        self._beat, self._store_silent = 0, 0.0
        self._unchanged: dict[int, tuple[int, float]] = {}
        """Of each other rank, its last beat and for how many seconds that has been the last; kept while idle."""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-hang-watch", daemon=True)

    def __enter__(self) -> "HangWatch":
        self.world.activity.enter(activity.START_UP)
        self._watched = threading.get_ident()
        self._board = Board(self.world.store, self.world.size) if self.world.size > 1 else None
        if self.hang_timeout:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join(5)
        if self.world.is_main and self.world.folder != Path():
            remove_live(self.world.folder)

    @property
    def _pause(self) -> float:
        calm = min(_LOOK_EVERY, max(0.1, self.hang_timeout / 20))
        return min(1.0, calm) if self._is_suspicious else calm

    @property
    def _is_suspicious(self) -> bool:
        return self._clock.idle >= self.hang_timeout / 2

    def _run(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # of this thread: to ask for events makes no other context
        last = time.monotonic()
        with self._dump_on_signal():
            while not self._left.wait(pause := self._pause):
                now = time.monotonic()
                elapsed, last = min(now - last, 3 * pause), now  # the process may have been stopped meanwhile
                self._clock.tick(elapsed)
                self._look(elapsed)
        if self._board is not None:
            self._board.post(
                RankState(self.world.rank, done=True, phase=activity.CLOSING, step=self.world.activity.step)
            )

    @contextmanager
    def _dump_on_signal(self) -> Iterator[None]:
        """Write the stack to a file without a name at SIGUSR2, even where C code holds the GIL.

        Another rank of this machine sends the signal, and reads the file in /proc. Only the thread that gets the
        signal is written: to read the stacks of running threads without the GIL may crash the process.
        """
        if self.world.size == 1 or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
            yield
            return
        with tempfile.TemporaryFile() as dump:
            faulthandler.register(signal.SIGUSR2, dump, all_threads=False)
            self._process |= {"dump": dump.fileno()}
            try:
                yield
            finally:
                faulthandler.unregister(signal.SIGUSR2)

    def _look(self, elapsed: float) -> None:
        """Publish the state of this rank, and report a hang if there is one."""
        own = self._own_state()
        if self._board is None:
            self._publish([own])
            if own.limit is not None and own.idle >= own.limit:
                self._end([self._with_stacks(own)])
            return
        self._board.post(own)
        states = self._board.read() if self.world.is_main or self._is_suspicious else {}
        if self.world.is_main:
            self._publish((states | {own.rank: own}).values())
        if not self._is_suspicious:
            self._unchanged.clear()
            self._store_silent = 0.0
            return
        if self._board.is_announced("hang"):
            self._answer(own)
        self._store_silent = 0.0 if self._board.answers else self._store_silent + elapsed
        if self._store_silent >= self.hang_timeout / 2 and own.limit is not None and own.idle >= own.limit:
            report_cut_off(f"has not answered for {self._store_silent:.0f} s")
            self._end([self._with_stacks(own)])
        if self._board.answers:
            self._judge(own, states, elapsed)

    def _publish(self, states: Iterable[RankState]) -> None:
        """Write what `lockstep top` shows, once the run has a folder."""
        if self.world.folder != Path():
            write_live(self.world.folder, states)

    def _own_state(self) -> RankState:
        """Return the state of this rank; whether it waits for others is looked up only when it makes no progress."""
        now, self._beat = self.world.activity, self._beat + 1
        found = waits_in(stack_of(self._watched)) if self._is_suspicious and self.world.size > 1 else None
        waits = found is not None and found[0] != "backward"
        return RankState(
            self.world.rank, self._beat, self._clock.idle, self._clock.limit(waits), waits, False, now.phase, now.step,
            now.loads_data, self.world.device.type == "cuda", self._process, now.data_seconds,
            **asdict(device_load(self.world.device)),
        )  # fmt: skip

    def _with_stacks(self, state: RankState) -> RankState:
        state.stack, state.threads = stack_of(self._watched), all_stacks(self._watched)
        state.unfinished = _unfinished_collective() if state.on_gpu and self.world.size > 1 else ""
        return state

    def _judge(self, own: RankState, read: dict[int, RankState], elapsed: float) -> None:
        """End the run if no rank makes progress; only the lowest rank that responds does so."""
        states = {rank: read.get(rank, RankState(rank)) for rank in range(self.world.size)} | {own.rank: own}
        active = [state for state in states.values() if not state.done]
        silent = {state.rank for state in active if state is not own and self._is_silent(state, elapsed)}
        for state in active:
            state.idle = max(state.idle, own.idle) if state.rank in silent else state.idle
        if own.rank != min(state.rank for state in active if state.rank not in silent):
            return
        someone_waits = any(state.waits for state in active)
        if all(self._exceeds(state, someone_waits) for state in active):
            self._declare(own, active, silent)

    def _is_silent(self, state: RankState, elapsed: float) -> bool:
        beat, seconds = self._unchanged.get(state.rank, (-1, 0.0))
        seconds = seconds + elapsed if state.beat == beat else 0.0
        self._unchanged[state.rank] = state.beat, seconds
        return seconds >= self.hang_timeout / 3

    def _exceeds(self, state: RankState, someone_waits: bool) -> bool:
        if state.limit is not None:
            return state.idle >= state.limit
        return someone_waits and state.idle >= 0.9 * self.timeout  # soon the collective fails, and says less

    def _declare(self, own: RankState, states: list[RankState], silent: set[int]) -> None:
        """Collect the stacks of all ranks, and end the run; unless a rank has failed, which is reported elsewhere."""
        assert self._board is not None
        self._board.announce("hang")
        if not first_to_fail():
            self._left.set()
            return
        awaited, deadline = {s.rank for s in states} - silent - {own.rank}, time.monotonic() + _ANSWER
        answers = dict[int, RankState]()
        while awaited - answers.keys() and time.monotonic() < deadline:
            self._left.wait(0.1)
            answers = self._board.read("stacks")
        answers[own.rank] = self._with_stacks(own)
        found = [answers.get(state.rank, state) for state in states]
        for state in found:
            if state.rank in silent:
                _examine(state)
        self._end(found)

    def _answer(self, own: RankState) -> None:
        """Send the stacks to the rank that reports, wait for it, and exit."""
        assert self._board is not None
        self._board.post(self._with_stacks(own), "stacks")
        deadline = time.monotonic() + 2 * _ANSWER
        while self._board.answers and not self._board.is_announced("reported") and time.monotonic() < deadline:
            self._left.wait(0.1)
        _exit()

    def _end(self, states: list[RankState]) -> None:
        """Write and print what was found, and exit; ranks of this machine that do not respond are killed."""
        idle = max(state.idle for state in states)
        head = f"the run hangs: no progress for {idle:.0f} s (--hang_timeout {self.hang_timeout:g})"
        summary = "\n    ".join((head, *diagnose(states)))
        with suppress(Exception):  # nobody may read the output, the disk may be the reason of the hang
            answer_within(_ANSWER, lambda: self._write(summary, report(states)))
        if not self.ends_process:
            self._left.set()
            return
        if self._board is not None:
            self._board.announce("reported")
        for state in states:
            if state.silent and is_running(state.process):
                _kill(state.process["pid"], children_only=False)
        _exit()

    def _write(self, summary: str, stacks: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        sys.stderr.write(f"lockstep: {summary}\n    all stacks are in {self.world.folder / FILE}\n")
        sys.stderr.flush()
        for name, text in (("log.txt", f"{now} {summary}\n"), (FILE, f"{now} {summary}\n\n{stacks}\n")):
            path = self.world.folder / name
            if name == FILE or path.exists():  # a script's folder has no log
                with suppress(OSError), path.open("a") as file:
                    file.write(text)


def _exit() -> NoReturn:
    _kill(os.getpid(), children_only=True)
    os._exit(HANG_STATUS)


def _kill(pid: int, children_only: bool) -> None:
    """End a process, and its loader's processes, which would not notice; SIGTERM would wait for Python code."""
    import psutil  # a tenth of the time to import lockstep

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for victim in (*process.children(recursive=True), *(() if children_only else (process,))):
            with suppress(psutil.Error):
                victim.kill()


def _examine(state: RankState) -> None:
    """Fill in why a rank does not respond, and its stack where faulthandler could write one."""
    here, pid = is_running(state.process) if state.process else None, state.process.get("pid", 0)
    if here is None:
        state.silent = "does not respond: it is stopped, or its machine cannot be reached"
    elif not here:
        state.silent = f"has exited (process {pid})"
    elif process_state(pid) in "Tt":
        state.silent = f"does not respond: process {pid} is stopped (SIGSTOP?)"
    else:
        state.threads = _dumped_stack(state.process)
        line = _dumped_line(state.threads)
        where = f" at {line}" if line else ""
        state.silent = f"does not respond since {state.when()}{where}: its code holds the GIL"


def _dumped_stack(process: dict[str, Any]) -> str:
    """Return what faulthandler writes in another process of this machine; see `_dump_on_signal`."""
    if "dump" not in process:
        return ""
    with suppress(OSError):
        os.kill(process["pid"], signal.SIGUSR2)
        for _ in range(20):
            threading.Event().wait(0.05)
            if text := Path(f"/proc/{process['pid']}/fd/{process['dump']}").read_text(errors="replace"):
                return text
    return ""


def _dumped_line(dump: str) -> Line | None:
    """Return the line at which a thread was when faulthandler wrote its stack, which has the innermost line first."""
    found = re.findall(r'File "(.+?)", line (\d+) in (.+)', dump)
    stack = [Line(file, int(number), function, "") for file, number, function in reversed(found)]
    return own_line(stack) if stack else None


def _unfinished_collective() -> str:
    """Return the first collective that NCCL has not finished; empty if that is not known."""
    with suppress(Exception):  # the flight recorder is no public interface
        recorder: Any = torch._C._distributed_c10d
        trace = recorder._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)
        first = json.loads(trace)["entries"][0]
        return f"{first['profiling_name']} (number {first['collective_seq_id']})"
    return ""
