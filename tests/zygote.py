"""A prepared interpreter: imports torch and Lockstep once, and forks a process for each command that a test starts.

Most of what a short run costs is the import of torch, in each of its processes. `serve` answers the clients in
folder/bin (see shim.py). A forked process goes on as a fresh interpreter would: words, folder, environment, open files,
network, signals, `__main__`, exit status. What differs: modules are loaded already, the hash seed is the same in all of
them, and the process is a child of the zygote. `os.getppid` returns the parent of the client, and folder/pids/N holds
the process id that belongs to client N.
"""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import multiprocessing
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from shim import FORWARDED

PRELOADED = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api", "torch.utils.tensorboard",
    "wandb", "matplotlib.pyplot", "gemmi",
)  # fmt: skip
"""Beside all of Lockstep."""
SCRIPTS = ("lockstep.__main__", "lockstep.audit.call")
"""Modules for `python -m`, which complains of those that are loaded already."""
NEED_TRITON = ("lockstep.exact_cuda",)
"""Modules that cannot be imported without a GPU's packages."""
_DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_FREE = 500
"""No file of a client or of the zygote has this number, nor a higher one."""


class Request(NamedTuple):
    """What a client asks for."""

    client: int
    executable: str
    words: list[str]
    unbuffered: bool
    cwd: str
    environment: dict[bytes, bytes]
    umask: int
    files: list[int]
    """The client's numbers of its open files, in the order in which they were sent."""
    ignored: list[int]
    """Signals."""


@dataclass
class Child:
    """A forked process, and the connection to the client that waits for it."""

    pid: int
    pidfd: int
    connection: socket.socket
    file: Path
    """Holds the process id, for tests; see `processes.process_of`."""


def serve(folder: Path, listener: int) -> None:
    """Fork a process for each request until standard input ends."""
    site = sys.path[1 + os.environ["PYTHONPATH"].count(os.pathsep) + 1 :]
    asked = Zygote(folder / "pids", socket.socket(fileno=listener)).wait()
    if asked is not None:
        request, files = asked
        _detach(request, files, folder)
        _run_as_main(request, site)


class Zygote:
    """The server. It has one thread, so that no process is forked with a lock that another thread holds."""

    def __init__(self, pids: Path, listener: socket.socket):
        self.pids, self.listener, self.prepared = pids, listener, False
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)

    def wait(self) -> tuple[Request, list[int]] | None:
        """Return the request and its open files in a forked process, None at the end of the server."""
        while True:
            key, _ = self.selector.select()[0]
            if key.fileobj is sys.stdin:
                self._kill_all()
                return None
            if key.fileobj is self.listener:
                asked = self._accept()
                if asked is not None:
                    return asked
            elif key.fileobj is key.data.connection:
                self._forward_signals(key.data)
            else:
                self._reap(key.data)

    def _accept(self) -> tuple[Request, list[int]] | None:
        if not self.prepared:
            self._prepare()
        connection, _ = self.listener.accept()
        size, files, _, _ = socket.recv_fds(connection, 4, 250)
        request = Request(*marshal.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)))
        pid = os.fork()
        if pid == 0:
            self._close()
            connection.close()
            return request, files
        for file in files:
            os.close(file)
        child = Child(pid, os.pidfd_open(pid), connection, self.pids / str(request.client))
        self.selector.register(child.connection, selectors.EVENT_READ, child)
        self.selector.register(child.pidfd, selectors.EVENT_READ, child)
        return None

    def _prepare(self) -> None:
        package = importlib.import_module("lockstep").__path__
        modules = [module.name for module in pkgutil.walk_packages(package, "lockstep.")]
        for name in (*PRELOADED, *modules):
            if name not in (*SCRIPTS, *NEED_TRITON):
                importlib.import_module(name)
        assert len([*Path("/proc/self/task").iterdir()]) == 1, "an import has started a thread"
        gc.collect()
        gc.freeze()  # so that the collector of a forked process does not write to, and so copy, all of this memory
        self.prepared = True

    def _children(self) -> list[Child]:
        return [key.data for key in self.selector.get_map().values() if key.data and key.fileobj == key.data.pidfd]

    def _close(self) -> None:
        for child in self._children():
            os.close(child.pidfd)
            child.connection.close()
        self.selector.close()
        self.listener.close()

    def _forward_signals(self, child: Child) -> None:
        numbers = child.connection.recv(64)
        for number in numbers:
            os.kill(child.pid, number)
        if not numbers:  # the client was killed
            self.selector.unregister(child.connection)
            self._kill(child)

    def _kill(self, child: Child) -> None:
        """With its loader's processes. Before it has a group of its own there are none."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(child.pid, signal.SIGKILL)

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        child.file.unlink(missing_ok=True)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        with suppress(KeyError):  # the client was killed
            self.selector.unregister(child.connection)
            with suppress(BrokenPipeError):
                child.connection.send(status.to_bytes(4, "big"))
        child.connection.close()

    def _kill_all(self) -> None:
        for child in self._children():
            self._kill(child)
            os.waitpid(child.pid, 0)


def _detach(request: Request, files: list[int], folder: Path) -> None:
    """Let this process have what the client has, and nothing of the zygote's own."""
    os.setsid()
    _join_network(request.client)
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
    for number, file in zip(request.files, _out_of_the_way(files), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.cwd)
    os.umask(request.umask)
    for number in FORWARDED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else default)
    for name in set(os.environb) - set(request.environment):
        del os.environb[name]
    os.environb.update(request.environment)
    tempfile.tempdir = None  # that of the zygote; TMPDIR may name another
    os.getppid = _parent_of(request.client, os.getppid)
    (folder / "pids" / str(request.client)).write_text(str(os.getpid()))
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    numpy.random.seed()  # Python's own generator does so by itself
    torch.default_generator.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _join_network(client: int) -> None:
    """Enter the network namespace of the client, which `ip netns exec` may have started."""
    theirs = Path(f"/proc/{client}/ns/net")
    if theirs.readlink() != Path("/proc/self/ns/net").readlink():
        with theirs.open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, "cannot enter the network namespace"


def _out_of_the_way(files: list[int]) -> list[int]:
    """Copies with numbers that no client has."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FREE) for file in files]
    for file in files:
        os.close(file)
    return copies


def _parent_of(client: int, original: Callable[[], int]) -> Callable[[], int]:
    own, stat = os.getpid(), Path(f"/proc/{client}/stat")

    def getppid() -> int:
        if os.getpid() != own:  # in a process that was forked from this one
            return original()
        try:
            return int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the client was killed, and so will be this process
            return 1

    return getppid


def _run_as_main(request: Request, site: list[str]) -> NoReturn:
    """Do what `python` does with its command line."""
    sys.executable, sys.orig_argv = request.executable, [request.executable, *request.words]
    multiprocessing.set_executable(request.executable)
    multiprocessing.process.ORIGINAL_DIR = request.cwd  # type: ignore[attr-defined]
    if request.unbuffered:
        sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr)  # type: ignore[misc]
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    what, *rest = request.words
    script = what not in ("-c", "-m")
    sys.argv = request.words if script else [what, *rest[1:]]
    beside = os.path.realpath(what) if os.path.islink(what) else os.path.abspath(what)  # noqa: PTH100, PTH114
    first = os.path.dirname(beside) if script else "" if what == "-c" else request.cwd  # noqa: PTH120
    paths = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(paths.split(os.pathsep) if paths else []), *site]
    _end(_status(lambda: _execute(what, rest, main)))


def _unbuffered(stream: TextIO) -> TextIO:
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


def _execute(what: str, rest: list[str], main: types.ModuleType) -> None:
    if what == "-m":
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        exec(rest[0], vars(main))
    else:
        file = os.path.abspath(what)  # noqa: PTH100, no link is followed
        vars(main).update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        exec(compile(Path(file).read_bytes(), file, "exec"), vars(main))


def _status(code: Callable[[], None]) -> int:
    """Run the code of a process; return its exit status."""
    try:
        code()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException as error:
        behind = error.__traceback__
        for _ in range(3):  # without the functions of this file
            behind = behind and behind.tb_next
        sys.excepthook(type(error), error.with_traceback(behind), behind)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    else:
        return 0
    return 1


def _end(status: int) -> NoReturn:
    """Exit without tearing down thousands of modules, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):  # it is closed
            stream.flush()
    os._exit(status & 0xFF)
