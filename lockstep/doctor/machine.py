"""Cores, memory, shared memory, open files, disk, ports and the host's name."""

import errno
import os
import resource
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from .check import Result, green, red, size, yellow

GIB = 2.0**30
TORCHRUN_PORT = 29500
"""What torchrun and MASTER_PORT are set to in most scripts."""
_PROBE = 64 * 2**20
"""Bytes that are written to measure the disk."""


@dataclass(frozen=True)
class Machine:
    """What the operating system, or a container, allows."""

    cores: int
    memory: float
    """Bytes that can be used, by the machine or the container."""
    shared_memory: float | None
    """Free bytes of /dev/shm; None where there is no such thing."""
    open_files: int
    open_files_hard: int
    disk_free: float
    disk_speed: float | None
    """Bytes per second written and flushed; None if nothing can be written."""
    runs: str
    """The folder whose disk it is."""
    port_owner: str | None = None
    """Who listens on torchrun's port; None if it is free."""
    free_ports: bool = True
    load: float = 0.0
    """Processes that want a core, on average over the last minute."""
    host_name: str = "localhost"
    host_address: str | None = "127.0.0.1"
    """What the name resolves to; None if it does not."""


def read(runs: Path) -> Machine:
    """Return the facts about this machine; `runs` is the folder that runs go to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = Path("/dev/shm")
    folder = _existing(runs)
    name, address = socket.gethostname(), None
    with suppress(OSError):
        address = socket.gethostbyname(name)
    return Machine(
        cores=_cores(),
        memory=min(psutil.virtual_memory().available, _cgroup_memory()),
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=_unlimited(soft),
        open_files_hard=_unlimited(hard),
        disk_free=shutil.disk_usage(folder).free,
        disk_speed=_write_speed(folder),
        runs=str(folder),
        port_owner=_owner(TORCHRUN_PORT),
        free_ports=_has_free_port(),
        load=os.getloadavg()[0],
        host_name=name,
        host_address=address,
    )


def _cores() -> int:
    """Return the cores that this process may use: those of its affinity, and of the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    return cores


def _cgroup_memory() -> float:
    with suppress(OSError, ValueError):
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return float("inf") if limit == "max" else float(limit) - float(used)
    return float("inf")


def _unlimited(limit: int) -> int:
    return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _write_speed(folder: Path) -> float | None:
    """Return bytes per second, of a file that is removed again."""
    probe = folder / f".lockstep-doctor-{os.getpid()}"
    block = os.urandom(2**20)
    try:
        started = time.perf_counter()
        with probe.open("wb") as file:
            for _ in range(_PROBE // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _PROBE / (time.perf_counter() - started)
    except OSError:
        return None
    finally:
        probe.unlink(missing_ok=True)


def _owner(port: int) -> str | None:
    """Return who listens on a port, as far as it can be known; None if it is free."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        return None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"


def _has_free_port() -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", 0)):
        return True
    return False


def check(found: Machine, ranks: int = 1) -> list[Result]:
    return [
        _cores_for(found, ranks), _memory(found), _shared_memory(found, ranks), _open_files(found), _disk(found),
        _disk_speed(found), _port(found), _host_name(found),
    ]  # fmt: skip


def _cores_for(found: Machine, ranks: int) -> Result:
    if found.cores < 2 * ranks:
        what, remedy = f"{found.cores} for {ranks} rank(s)", "a rank needs a core, and its loader at least one more"
        return yellow("CPU cores", what, f"{remedy}; in a container, raise its limit (--cpus)")
    if found.load > 1.5 * found.cores:
        what = f"{found.cores}, and {found.load:.0f} processes want one"
        return yellow(
            "CPU cores", what, "end other processes (top shows them): every step waits, and so do these checks"
        )
    return green("CPU cores", str(found.cores))


def _memory(found: Machine) -> Result:
    text = f"{size(found.memory)} available"
    if found.memory < 2 * GIB:
        return red("memory", text, "end other processes, or raise the limit of the container; use fewer --num_workers")
    return green("memory", text)


def _shared_memory(found: Machine, ranks: int) -> Result:
    if found.shared_memory is None:
        return green("shared memory", "there is no /dev/shm on this system")
    text, wanted = f"{size(found.shared_memory)} free in /dev/shm", 1.0 * GIB * ranks
    remedy = "loader processes and NCCL need it: start the container with --shm-size=16g or --ipc=host; else clear it"
    if found.shared_memory < 0.125 * GIB:
        return red("shared memory", text, f"{remedy}; --num_workers 0 does without")
    if found.shared_memory < wanted:
        return yellow("shared memory", f"{text} for {ranks} rank(s)", remedy)
    return green("shared memory", text)


def _open_files(found: Machine) -> Result:
    text = f"up to {found.open_files:,}" if found.open_files < 2**62 else "without limit"
    if found.open_files >= 4096:
        return green("open files", text)
    wanted = min(65_536, found.open_files_hard)
    raised = f"ulimit -n {wanted}" if wanted > found.open_files else "raise the hard limit (limits.conf, or --ulimit)"
    result = red if found.open_files < 512 else yellow
    return result("open files", f"{text}: each loader process needs many", f"{raised}, before starting")


def _disk(found: Machine) -> Result:
    text = f"{size(found.disk_free)} free in {found.runs}"
    remedy = "free some, or choose another place with --out; --keep limits how many checkpoints are kept"
    if found.disk_free < GIB:
        return red("disk", text, remedy)
    return yellow("disk", text, remedy) if found.disk_free < 10 * GIB else green("disk", text)


def _disk_speed(found: Machine) -> Result:
    if found.disk_speed is None:
        return red("disk speed", f"nothing can be written to {found.runs}", "change its permissions, or choose --out")
    text = f"{found.disk_speed / 1e6:,.0f} MB/s written and flushed"
    if found.disk_speed < 50e6:
        return yellow("disk speed", text, "checkpoints will take long: choose a local disk with --out, or --save_every")
    return green("disk speed", text)


def _port(found: Machine) -> Result:
    if not found.free_ports:
        return red("ports", "none is free on the loopback", "end processes that hold connections (ss -tanp)")
    if found.port_owner is not None:
        remedy = f"torchrun --master_port={TORCHRUN_PORT + 1}, or lockstep train --nproc, which takes a free one"
        return yellow("ports", f"{TORCHRUN_PORT}, torchrun's own, is in use by {found.port_owner}", remedy)
    return green("ports", f"{TORCHRUN_PORT} is free")


def _host_name(found: Machine) -> Result:
    if found.host_address is None:
        remedy = "add it to /etc/hosts; on several machines give addresses, not names (--master_addr=10.0.0.1)"
        return yellow("host name", f"{found.host_name} does not resolve", remedy)
    return green("host name", f"{found.host_name} is {found.host_address}")
