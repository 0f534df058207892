"""Two hosts on this machine: network namespaces with a cable between them that a test can cut."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@dataclass
class Hosts:
    """The names of the two namespaces and of the interface in each."""

    names: list[str]
    interfaces: list[str]

    def command(self, host: int, words: list[str]) -> list[str]:
        """Return the command that runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def cut(self) -> None:
        """Take the cable out: no packet, and no word of it, reaches the other host."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def processes(self, host: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.names[host]).split()]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Yield two hosts that reach each other; what still runs on them is killed at the end."""
    hosts = Hosts([f"lockstep-{i}-{os.getpid()}" for i in range(2)], [f"ls{i}-{os.getpid()}" for i in range(2)])
    try:
        try:
            _connect(hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        for host, name in enumerate(hosts.names):
            with suppress(OSError, subprocess.CalledProcessError):
                for pid in hosts.processes(host):
                    os.kill(pid, 9)
                _ip("netns", "del", name)


def _connect(hosts: Hosts) -> None:
    for name in hosts.names:
        _ip("netns", "add", name)
    _ip("link", "add", hosts.interfaces[0], "type", "veth", "peer", "name", hosts.interfaces[1])
    for name, interface, address in zip(hosts.names, hosts.interfaces, ADDRESSES, strict=True):
        _ip("link", "set", interface, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
        for device in ("lo", interface):
            _ip("-n", name, "link", "set", device, "up")
