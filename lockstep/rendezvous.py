"""How ranks find each other: the store, the network interface, and errors that say what is wrong with them.

A run on one machine listens on the loopback interface only: nothing outside the machine can reach it.
"""

import ipaddress
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable from which gloo takes its network interface."""
MARGIN = 5.0
"""Seconds that torch has, after --timeout, to report its own error before the process exits with ours."""


class RendezvousError(ValueError):
    """This rank cannot connect to the others; every machine reports its own reason."""


def address() -> str:
    """Return where the store is, as host:port."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def on_one_machine() -> bool:
    """Return whether all ranks are known to be on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and local == os.environ["WORLD_SIZE"]:
        return True
    return _is_loopback(os.environ["MASTER_ADDR"])


def _is_loopback(host: str) -> bool:
    """Return whether a host is loopback by its name alone: a machine's own name may resolve to 127.0.1.1."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def loopback_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store that listens on the loopback only (torch's own listens on all addresses); port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def open_store(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store that the environment names; rank 0 starts it unless torchrun's agent has."""
    limit, host = timedelta(seconds=timeout), os.environ["MASTER_ADDR"]
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not agent_has_it and _is_loopback(host):
        host = LOOPBACK if host == "localhost" else host
        store: dist.Store = loopback_store(host, int(os.environ["MASTER_PORT"]), limit)
    else:
        if rank > 0 or agent_has_it:
            _wait_until_reachable(host, int(os.environ["MASTER_PORT"]), timeout)
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
    store.set_timeout(limit)
    return _fresh_store(store, rank, size, timeout)


def _wait_until_reachable(host: str, port: int, timeout: float) -> None:
    """Wait until something listens at the store's address; raise the last error of the operating system at the end.

    torch would wait as long, and print its own stack traces.
    """
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() + 0.2 > deadline:
                raise
            pause.wait(0.2)


def _fresh_store(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """Return a view of the store under a prefix that only the processes running now know.

    torchrun's agent keeps its store when workers are restarted or a node joins, and nodes do not even agree on how
    often that has happened. So rank 0 makes up a prefix and sends it to each rank that asks, until all have confirmed
    it; keys left in the store by processes that have exited confirm nothing.
    """
    if rank > 0:
        request = uuid.uuid4().hex
        store.set(f"lockstep/request/{rank}", request)
        prefix = store.get(f"lockstep/prefix/{request}").decode()
        store.set(f"lockstep/{prefix}/joined/{rank}", "")
        return dist.PrefixStore(f"lockstep/{prefix}", store)
    prefix, missing, answered = uuid.uuid4().hex, set(range(1, size)), set()
    pause, deadline = threading.Event(), time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"lockstep/{prefix}/joined/{other}"]):
                missing.discard(other)
            elif store.check([f"lockstep/request/{other}"]):
                request = store.get(f"lockstep/request/{other}").decode()
                if request not in answered:
                    answered.add(request)
                    store.set(f"lockstep/prefix/{request}", prefix)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"missing: rank {', '.join(str(r) for r in sorted(missing))}")
        pause.wait(0.01)
    return dist.PrefixStore(f"lockstep/{prefix}", store)


def choose_interface() -> None:
    """Let gloo use the interface over which this machine reaches MASTER_ADDR; on one machine the loopback.

    GLOO_SOCKET_IFNAME wins where it is set. Without it gloo takes the address of the host's name, which is often the
    loopback: the ranks of another machine then wait without end.
    """
    existing = [name for _, name in socket.if_nameindex()]
    if chosen := os.environ.get(INTERFACE):
        if not set(chosen.split(",")) <= set(existing):
            raise RendezvousError(
                f"{INTERFACE} is {chosen}, but this machine has {', '.join(existing)}; set it to the interface that "
                "reaches the other machines, or unset it"
            )
    elif name := _loopback_interface(existing) if on_one_machine() else _interface_of(_own_address()):
        os.environ[INTERFACE] = name


def _loopback_interface(existing: list[str]) -> str | None:
    return next((name for name in ("lo", "lo0") if name in existing), None)


def _own_address() -> str | None:
    """Return the address from which this machine reaches MASTER_ADDR; no packet is sent for it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                own = str(probe.getsockname()[0])
                if not ipaddress.ip_address(own).is_loopback:
                    return own
    return None


def _interface_of(own_address: str | None) -> str | None:
    import psutil  # takes a tenth of the time to import lockstep, and runs on one machine do without it

    for name, addresses in psutil.net_if_addrs().items():
        if own_address in [entry.address.partition("%")[0] for entry in addresses]:
            return name
    return None


@contextmanager
def explained(timeout: float, have_met: bool = False) -> Iterator[None]:
    """Turn an error of the block into a RendezvousError; exit if torch waits beyond the time-out.

    `have_met`: the ranks have found each other at the store, and connect to one another in the block.
    """
    timer = threading.Timer(timeout + MARGIN, _exit_unconnected, [timeout, have_met])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        raise RendezvousError(_explain(error, timeout, have_met)) from None
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise RendezvousError(_explain(error, timeout, have_met)) from None
    finally:
        timer.cancel()


def _exit_unconnected(timeout: float, have_met: bool) -> None:
    """Exit although a call of torch has not returned: without a peer, or over a cut connection, some never do."""
    error = dist.DistStoreError(f"no answer in {timeout:g} s (--timeout)")
    sys.stderr.write(f"lockstep: rank {os.environ['RANK']}: {_explain(error, timeout, have_met)}\n")
    sys.stderr.flush()
    os._exit(2)


def _explain(error: Exception, timeout: float, have_met: bool) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "in use" in text:
        return f"the port of {address()} is in use; choose another with --master_port or MASTER_PORT"
    reason = text.splitlines()[0].rpartition("] ")[2]
    if have_met:
        interface = os.environ.get(INTERFACE) or "the interface of this host's name"
        return (
            f"the ranks have met at {address()} but cannot connect to each other over {interface}: set {INTERFACE}, "
            f"on each machine, to the interface that reaches the others ({reason})"
        )
    return (
        f"could not connect to the other ranks at {address()} within {timeout:g} s (--timeout): {reason}; "
        f"{_remedy(error)}"
    )


def _remedy(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "give a name or an address that this machine knows (--master_addr or MASTER_ADDR)"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there: is rank 0 started, with that address and port?"
    if isinstance(error, OSError):
        return "that machine does not answer: is the address right (--master_addr), and open to this machine?"
    return f"are all {os.environ['WORLD_SIZE']} of them started, and can they reach that address?"
