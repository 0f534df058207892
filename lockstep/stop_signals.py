"""Ctrl-C and a scheduler's signals as a request to stop after the step, answered at once."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
SAME_REQUEST = 1.0
"""Seconds within which signals count as one: a scheduler may reach a rank directly and through its launcher."""
LOST = "unsaved work is lost"
_open_sockets: set[socket.socket] = set()
"""Those that signals to this process are written to."""


def _forget_in_child() -> None:
    """Let signals to a forked process, a loader's for example, not count as signals to this rank."""
    if _open_sockets:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


class StopSignals:
    """Turns signals into a request to stop after the step. A second one ends the process.

    A thread waits for them: the main thread may be inside a kernel or a collective, where Python handles no signal.
    """

    def __init__(self, announce: Callable[[str], None] = lambda text: None) -> None:
        self.announce = announce
        """Called at the first signal, in a thread of its own."""
        self.work = "the next step"
        """What is still completed after a signal."""
        self.received = 0
        """The number of the first signal; 0 for none."""
        self._answered_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._writer: socket.socket | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        _open_sockets.add(self._writer)
        threading.Thread(target=self._wait, args=(reader,), name="lockstep-stop-signals", daemon=True).start()
        for number in HANDLED:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the terminal may be closed without ending the run
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._writer is not None:
            signal.set_wakeup_fd(self._previous_fd)
            _open_sockets.remove(self._writer)
            self._writer.close()  # ends the thread
            self._writer = None

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Handle a signal in the main thread, which so cannot begin a step that it has been asked not to make."""
        self.received = self.received or number

    def _wait(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(1):
                if numbers[0] in self._previous:
                    self._receive(signal.Signals(numbers[0]))

    def _receive(self, number: signal.Signals) -> None:
        if not self._answered_at:
            self.received, self._answered_at = self.received or number, time.monotonic()
            threading.Thread(target=self.announce, args=(self._answer(number),), daemon=True).start()
        elif time.monotonic() - self._answered_at > SAME_REQUEST:
            if os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # not by `announce`: the main thread may hold its lock for ever
                    os.write(2, f"\nlockstep: a second signal: stopped now, {LOST}\n".encode())
            os._exit(128 + number)

    def _answer(self, number: signal.Signals) -> str:
        again = "press Ctrl-C again" if number == signal.SIGINT else "send a second signal"
        return f"{number.name}: stopping after {self.work}; {again} to stop now, {LOST}"
