"""The client of zygote.py, in PATH as `python`, `torchrun` and `lockstep`: what a test starts and waits for.

Passes words, folder, environment and open files to the zygote, and signals to the process that it forks; ends as that
process does. Imports next to nothing, so that it starts in 20 ms.
"""

import _signal as signal
import _socket as socket
import marshal
import os
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(python: str) -> None:
    """`python` is the real interpreter, beside which the real torchrun and lockstep lie."""
    path, words = sys.argv[0], sys.argv[1:]
    bin_folder, name = os.path.split(os.path.abspath(path))
    if not name.startswith("python"):
        words.insert(0, os.path.join(os.path.dirname(python), name))
    unbuffered = words[:1] == ["-u"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    command = words[1:] if words[:1] == ["-u"] else words
    if not command or (command[0].startswith("-") and command[0] not in ("-c", "-m")):
        os.execv(python, [python, *words])
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _inherited(fd)]
    mask = os.umask(0)
    os.umask(mask)
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    executable = os.path.join(bin_folder, "python")
    request = (os.getpid(), executable, command, unbuffered, os.getcwd(), dict(os.environb), mask, files, ignored)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.path.join(os.path.dirname(bin_folder), "socket"))
    body = marshal.dumps(request)
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
    connection.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    connection.sendall(body)
    for number in FORWARDED:  # also those that are ignored: the process may handle them all the same
        signal.signal(number, lambda number, _: _forward(connection, number))
    answer = connection.recv(4)
    if not answer:
        sys.exit("the zygote has failed; what it said stands in the output of the tests")
    _end_like(int.from_bytes(answer, "big"))


def _forward(connection: socket.socket, number: int) -> None:
    try:
        connection.send(bytes([number]))
    except BrokenPipeError:  # the process has just ended, and the answer is on its way
        return


def _inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # with which the folder was listed
        return False


def _end_like(status: int) -> None:
    """Exit, or be killed, as the process that gave this wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
