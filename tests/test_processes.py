"""A command of the zygote does what it does with an interpreter of its own."""

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from processes import environment, process_of

SHOW = "import os, sys; print(__name__, sys.argv, sys.path, os.getcwd(), os.environ.get('GIVEN'), sys.stdin.read())"
FAILS = "def f():\n    raise KeyError('on purpose')\nf()\n"
COMMANDS = {
    "code": ["python", "-c", SHOW, "--flag", "1"],
    "script": ["python", "show.py", "--flag", "1"],
    "linked script": ["python3", "linked.py"],
    "module": ["python", "-u", "-m", "show", "x"],
    "package": ["python", "-m", "package"],
    "status": ["python", "-c", "import sys; sys.exit(7)"],
    "words at the end": ["python", "-c", "import sys; sys.exit('no')"],
    "exception": ["python", "fails.py"],
    "exception in a module": ["python", "-m", "fails"],
    "killed": ["python", "-c", "import os; os.kill(os.getpid(), 9)"],
    "leaves at once": ["python", "-c", "import os; print('lost', end=''); os._exit(3)"],
    "at exit": ["python", "-c", "import atexit; atexit.register(print, 'bye')"],
    "waits for threads": ["python", "-c", "import threading; threading.Timer(0.1, print, ['late']).start()"],
    "signals": ["python", "-c", "import signal; print([signal.getsignal(number) for number in (2, 13, 15)])"],
    "version": ["python", "--version"],
    "processes": ["python", "spawns.py"],
    "ignored signal": ["bash", "-c", "trap '' TERM; python -c 'import signal; print(signal.getsignal(15))'"],
    "shell": ["bash", "-c", "python -c 'print(1)' | python -c 'print(input() * 2)' && exec python -c 'exit(4)'"],
}  # fmt: skip
SPAWNS = """
import multiprocessing, subprocess, sys
def work(): print("spawned", __name__, flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode, subprocess.run([sys.executable, "-c", "print('again')"], capture_output=True).stdout)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "package").mkdir()
    for name in ("show.py", "elsewhere/there.py", "package/__main__.py"):
        (tmp_path / name).write_text(SHOW)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "linked.py").symlink_to("elsewhere/there.py")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_it_does_the_same_as_with_an_interpreter_of_its_own(command: str, folder: Path) -> None:
    done = [
        subprocess.run(
            COMMANDS[command], cwd=folder, env=environment(real, GIVEN="so"), input="hello", capture_output=True,
            text=True, timeout=300, check=False,
        )
        for real in (True, False)
    ]  # fmt: skip
    assert done[0].returncode == done[1].returncode
    assert (done[0].stdout, done[0].stderr) == (done[1].stdout, done[1].stderr)


def test_open_files_are_passed_on() -> None:
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'through')"
    subprocess.run(["python", "-c", code], env=environment(), pass_fds=[write], check=True)
    os.close(write)
    assert os.read(read, 100) == b"through" and os.read(read, 100) == b""
    os.close(read)


def test_processes_draw_different_numbers() -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    command = ["python", "-c", code]
    one, two = (subprocess.run(command, env=environment(), capture_output=True, check=True).stdout for _ in range(2))
    assert not set(one.split()) & set(two.split())


WAITS = """
import os, signal, sys
def handle(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(9)
signal.signal(signal.SIGTERM, handle)
print(os.getpid(), os.getppid(), flush=True)
signal.pause()
"""


def waiting(before: Callable[[], object] | None = None) -> tuple[subprocess.Popen[str], int]:
    """A process, and its own id."""
    command = ["python", "-c", WAITS]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, preexec_fn=before)
    assert process.stdout is not None
    pid, parent = map(int, process.stdout.readline().split())
    assert (pid, parent) == (process_of(process.pid), os.getpid())
    return process, pid


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_reaches_the_process(before: signal.Handlers) -> None:
    process, _ = waiting(partial(signal.signal, signal.SIGTERM, before))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "SIGTERM\n" and process.returncode == 9


def test_who_kills_one_kills_the_other() -> None:
    for process, pid in (waiting(), waiting()):
        os.kill(pid, signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
    process, _ = waiting()
    process.kill()
    process.communicate(timeout=300)  # which it could not, were the pipe still held
