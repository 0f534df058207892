"""Between machines: does each reach the others on any port, how fast, and do clocks and versions agree?

`lockstep doctor --hosts A,B,C` runs on every machine at the same time. Each listens on --port and on another port that
the system chooses, as gloo and NCCL do; and each connects to every other. Nothing is executed for a peer: it gets this
machine's versions and clock, and may send bytes that are counted and dropped.
"""

import json
import platform
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import __version__
from .check import Result, green, red, yellow

_CLOCK_QUESTIONS = 20
_BYTES = 32 * 2**20
_LINE = 4096
"""Bytes of a line of the protocol, at most."""


@dataclass(frozen=True)
class Peer:
    """Another machine, seen from this one."""

    host: str
    error: str = ""
    """Why it could not be reached; empty if it was."""
    other_port: bool = True
    """Whether a port that the system chose is reachable too."""
    latency: float = 0.0
    """Seconds there and back."""
    skew: float = 0.0
    """Its clock minus ours, in seconds; known to half the latency."""
    bandwidth: float = 0.0
    """Bytes per second, over one connection."""
    versions: dict[str, str] = field(default_factory=dict)


def own_versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {"lockstep": __version__, "Python": platform.python_version(), "torch": torch.__version__, "NCCL": nccl}


def find_self(hosts: list[str]) -> int:
    """Return which of the machines this one is: the one whose address it has."""
    own = []
    for i, host in enumerate(hosts):
        try:
            address = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        except OSError as error:
            raise ValueError(f"--hosts: {host} does not resolve ({error.strerror}); give its address") from None
        with suppress(OSError), socket.socket() as probe:
            probe.bind((address[0], 0))
            own.append(i)
    if len(own) != 1:
        which = "none of them is" if not own else f"{' and '.join(hosts[i] for i in own)} are both"
        raise ValueError(f"--hosts {','.join(hosts)}: {which} this machine; give each machine's address in the network")
    return own[0]


class Server:
    """Answers the other machines until it is closed."""

    def __init__(self, port: int):
        try:
            self._listeners = [socket.create_server(("", p), backlog=64) for p in (port, 0)]
        except OSError as error:
            raise ValueError(
                f"cannot listen on port {port} ({error.strerror}); choose another --port on all machines"
            ) from None
        self.other_port: int = self._listeners[1].getsockname()[1]
        self._hello = {"versions": own_versions(), "port": self.other_port}
        self._finished: set[str] = set()
        self._changed = threading.Condition()
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
            connection.settimeout(60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while line := stream.readline(_LINE).decode().split():
                if line[0] == "hello":
                    _send(stream, json.dumps(self._hello))
                elif line[0] == "time":
                    _send(stream, repr(time.time()))
                elif line[0] == "bytes":
                    left = min(int(line[1]), _BYTES)
                    while left:
                        left -= len(stream.read(min(left, 2**20))) or left
                    _send(stream, "received")
                elif line[0] == "finished":
                    with self._changed:
                        self._finished.add(line[1])
                        self._changed.notify_all()
                    return

    def wait(self, names: set[str], deadline: float) -> None:
        """Wait until these machines have said that they need no more answers."""
        with self._changed:
            self._changed.wait_for(lambda: names <= self._finished, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


def _send(stream: Any, text: str) -> None:
    stream.write(f"{text}\n".encode())
    stream.flush()


def examine(hosts: list[str], own: int, port: int, wait: float) -> list[Peer]:
    """Return every other machine, seen from this one; they may start up to `wait` seconds later."""
    deadline, server = time.monotonic() + wait, Server(port)
    others = [host for i, host in enumerate(hosts) if i != own]
    try:
        peers = [_examine(host, hosts[own], port, deadline) for host in others]
        server.wait({peer.host for peer in peers if not peer.error}, deadline)
    finally:
        server.close()
    return peers


def _examine(host: str, own: str, port: int, deadline: float) -> Peer:
    try:
        connection = _connect(host, port, deadline)
        with connection, connection.makefile("rwb") as stream:
            _send(stream, "hello")
            hello = json.loads(stream.readline(_LINE))
            latency, skew = _clock(stream)
            started = time.perf_counter()
            _send(stream, f"bytes {_BYTES}")
            stream.write(bytes(_BYTES))
            stream.flush()
            stream.readline(_LINE)
            bandwidth = _BYTES / (time.perf_counter() - started)
            other = _reachable(host, int(hello["port"]))
            _send(stream, f"finished {own}")
            return Peer(host, "", other, latency, skew, bandwidth, dict(hello["versions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Peer(host, str(getattr(error, "strerror", None) or error))


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Return a connection; a machine on which doctor is not running yet is asked again until the deadline."""
    pause = threading.Event()
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, min(5.0, deadline - time.monotonic())))
            connection.settimeout(60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError:
            if time.monotonic() + 0.3 > deadline:
                raise
            pause.wait(0.3)


def _clock(stream: Any) -> tuple[float, float]:
    """Return the shortest time there and back, and the skew seen in it."""
    answers = []
    for _ in range(_CLOCK_QUESTIONS):
        before, started = time.time(), time.perf_counter()
        _send(stream, "time")
        there = float(stream.readline(_LINE))
        took = time.perf_counter() - started
        answers.append((took, there - (before + took / 2)))
    return min(answers)


def _reachable(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 5.0):
        return True
    return False


def check(peers: list[Peer], port: int) -> list[Result]:
    return [result for peer in peers for result in _judge(peer, port)]


def _judge(peer: Peer, port: int) -> list[Result]:
    if peer.error:
        remedy = (
            f"is lockstep doctor --hosts running there too? is the address right? is port {port} open in the firewall?"
        )
        return [red(peer.host, f"not reached on port {port}: {peer.error}", remedy)]
    speed = f"{1e3 * peer.latency:.2g} ms there and back, {peer.bandwidth * 8 / 1e9:.2g} Gbit/s over one connection"
    results = [green(peer.host, speed)]
    if not peer.other_port:
        remedy = "gloo and NCCL take any port: open all TCP ports between the machines"
        results.append(red(f"{peer.host} ports", f"port {port} is open, a port that the system chose is not", remedy))
    if peer.bandwidth < 0.1e9:
        remedy = (
            "gradients cross this link in every step: use a faster network, or accumulation; is it the right interface?"
        )
        results.append(yellow(f"{peer.host} speed", speed, remedy))
    return [*results, _skew(peer), *_same_versions(peer)]


def _skew(peer: Peer) -> Result:
    name, text = f"{peer.host} clock", f"{1e3 * abs(peer.skew):,.2f} ms {'ahead' if peer.skew > 0 else 'behind'}"
    if abs(peer.skew) < 1.0:
        return green(name, text)
    result = red if abs(peer.skew) > 60 else yellow
    return result(
        name, text, "start a time service on both (chrony, systemd-timesyncd): logs and time-outs mix them up"
    )


def _same_versions(peer: Peer) -> list[Result]:
    own = own_versions()
    different = [f"{n} {peer.versions.get(n)} there, {own[n]} here" for n in own if peer.versions.get(n) != own[n]]
    if not different:
        return [green(f"{peer.host} versions", "the same")]
    return [yellow(f"{peer.host} versions", "; ".join(different), "install the same on all machines")]


def as_json(peers: list[Peer]) -> list[dict[str, Any]]:
    return [asdict(peer) for peer in peers]
