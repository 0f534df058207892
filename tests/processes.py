"""Commands for tests that start in no time: `environment()` has `python`, `torchrun` and `lockstep` of the zygote.

LOCKSTEP_REAL=1 gives each process an interpreter of its own.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
_FOLDER = "LOCKSTEP_TEST_ZYGOTE"
_SHIM = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
_SHIM += f"from shim import main\nmain({sys.executable!r})\n"


@contextmanager
def zygote() -> Iterator[None]:
    """A zygote for this process and those that it starts; it imports torch when it is first asked for a process."""
    if _FOLDER in os.environ or os.environ.get("LOCKSTEP_REAL") == "1":  # the former in a process of pytest-xdist
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="lockstep-zygote-"))
    (folder / "pids").mkdir()
    (folder / "bin").mkdir()
    for name in ("python", "python3", "torchrun", "lockstep"):
        (folder / "bin" / name).write_text(_SHIM)
        (folder / "bin" / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        code = f"from pathlib import Path; import zygote; zygote.serve(Path({str(folder)!r}), {listener.fileno()})"
        server = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
            env=environment(real=True), cwd=folder, start_new_session=True,
        )  # fmt: skip
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[_FOLDER]
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def environment(real: bool = False, **extra: str) -> dict[str, str]:
    """The variables of a command of a test. `real`: with an interpreter of its own, not one that the zygote forks."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONDONTWRITEBYTECODE")  # the last costs each process 0.3 s
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    folders = [BIN] if real else [shims(), BIN]
    path = {
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    return kept | path | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra


def shims() -> Path:
    """The folder with the commands of the zygote."""
    return Path(os.environ[_FOLDER]) / "bin" if _FOLDER in os.environ else BIN


def process_of(client: int) -> int:
    """The process id of a command of the zygote, whose client has this one; of another command its own."""
    file = Path(os.environ.get(_FOLDER, "")) / "pids" / str(client)
    return int(file.read_text()) if file.exists() else client
