"""Signals: the first is answered at once and asks for a stop, the second ends the process."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from processes import environment

from lockstep.stop_signals import StopSignals


def eventually(holds: Callable[[], object]) -> bool:
    """Whether it holds within a minute."""
    return any(holds() or threading.Event().wait(0.01) for _ in range(6000))


def test_the_first_signal_is_answered_and_asks_for_a_stop() -> None:
    said: queue.Queue[str] = queue.Queue()
    before = signal.getsignal(signal.SIGINT)
    with StopSignals(said.put) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        answer = said.get(timeout=60)
    assert answer == "SIGINT: stopping after the next step; press Ctrl-C again to stop now, unsaved work is lost"
    assert signals.received == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    assert eventually(lambda: not any(t.name == "lockstep-stop-signals" for t in threading.enumerate()))


def test_a_signal_to_a_forked_process_is_not_one_to_this() -> None:
    with StopSignals() as signals:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert eventually(lambda: signals.received)
    assert signals.received == signal.SIGUSR1


TWICE = """
import threading
from lockstep import stop_signals

stop_signals.SAME_REQUEST = 0
with stop_signals.StopSignals(lambda text: print(text, flush=True)):
    print("ready", flush=True)
    threading.Event().wait(100)
"""


def test_the_second_signal_says_that_work_is_lost() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE], env=environment(real=True), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "stopping after the next step" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped now, unsaved work is lost" in errors


STUCK = """
import os, signal, threading
import torch
from lockstep.stop_signals import StopSignals

def answered(text):
    print(text, flush=True)
    os._exit(7)

with StopSignals(answered):
    main = threading.main_thread().ident
    threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    torch.linalg.matrix_power(torch.rand(1500, 1500), 1 << 40)
    print("too late", flush=True)
"""


def test_the_answer_does_not_wait_for_a_kernel() -> None:
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, env=environment(real=True), capture_output=True, text=True, timeout=300)
    assert done.returncode == 7 and done.stdout.startswith("SIGINT: stopping"), (done.stdout, done.stderr)
