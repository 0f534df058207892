"""What a run listens on, and what happens when machines cannot reach each other."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from processes import environment, process_of

from multi.namespaces import ADDRESSES, Hosts, two_hosts
from multi.ranks import free_port
from multi.test_launch import run, started, wait_for
from multi.test_resume import ranks_of

pytestmark = pytest.mark.slow

TINY = f"{tiny.__file__}:Tiny"
LONG = ["--n_steps", "1000000", "--log_every", "5"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def listening(pids: list[int]) -> set[str]:
    """The addresses on which these processes listen, as the kernel writes them."""
    sockets = set()
    for pid in pids:
        sockets |= {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def test_a_run_on_one_machine_listens_on_the_loopback_only(tmp_path: Path) -> None:
    process = started(["lockstep", "train", TINY, "--nproc", "2", *LONG, "--out", "here"], tmp_path)
    wait_for(process, "step 5/")
    agent = process_of(process.pid)
    ranks = ranks_of(agent)
    assert len(ranks) == 2 and listening([agent]) and all(listening([rank]) for rank in ranks)
    assert listening([agent, *ranks]) <= LOOPBACK
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) and process.returncode == 130


def test_ranks_started_by_hand_listen_on_the_loopback_only(tmp_path: Path) -> None:
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            ["lockstep", "train", TINY, *LONG, "--out", "here"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **group),
        )
        for rank in range(2)
    ]  # fmt: skip
    wait_for(ranks[0], "step 5/")
    for rank in ranks:
        addresses = listening([process_of(rank.pid)])
        assert addresses and addresses <= LOOPBACK
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    for rank in ranks:
        assert rank.communicate(timeout=300) and rank.returncode == 130


def node(hosts: Hosts, host: int, rendezvous: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """torchrun with one rank on a host."""
    port = "29500"
    where = [f"--node_rank={host}", f"--master_addr={ADDRESSES[0]}", f"--master_port={port}"]
    if rendezvous == "c10d":
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{port}", "--rdzv-id=job"]
        where += [f"--rdzv-conf=is_host={1 - host}", f"--local-addr={ADDRESSES[host]}"]
    command = ["torchrun", "--nnodes=2", "--nproc_per_node=1", *where, "-m", "lockstep", "train", TINY, *flags]
    return subprocess.Popen(
        hosts.command(host, command), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_nodes_whose_link_is_cut_end_by_themselves_and_the_run_can_be_resumed(
    hosts: Hosts, rendezvous: str, tmp_path: Path
) -> None:
    flags = [*LONG, "--save_every", "5", "--keep", "2", "--timeout", "3", "--out", "here"]
    nodes = [node(hosts, host, rendezvous, tmp_path, *flags) for host in range(2)]
    wait_for(nodes[0], "step 20/")
    hosts.cut()
    errors = [process.communicate(timeout=300)[1] for process in nodes]
    assert all(process.returncode != 0 for process in nodes)
    assert "rank 0: waited too long for another rank (--timeout)" in errors[0]
    assert f"rank 1: the store at {ADDRESSES[0]}:" in errors[1] and "has not answered for 3 s (--timeout)" in errors[1]
    assert not hosts.processes(0) and not hosts.processes(1)
    checkpoints = sorted(path.name for path in (tmp_path / "here/checkpoints").glob("step-*"))
    step = int(checkpoints[-1].removeprefix("step-"))
    done = run(["lockstep", "train", TINY, "--resume", "here", "--n_steps", str(step + 3)], tmp_path)
    assert done.returncode == 0 and f"at step {step}" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_node_ends_when_the_machine_with_the_store_has_died(hosts: Hosts, tmp_path: Path) -> None:
    nodes = [node(hosts, host, "static", tmp_path, *LONG, "--timeout", "600", "--out", "here") for host in range(2)]
    wait_for(nodes[0], "step 20/")
    for pid in hosts.processes(0):
        os.kill(pid, signal.SIGKILL)
    _, errors = nodes[1].communicate(timeout=300)
    assert nodes[1].returncode != 0
    assert "does not answer: that machine, or the network to it, is down" in errors


def alone(hosts: Hosts, host: int, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A rank on a host, started without torchrun, that waits 3 s for the other one."""
    group = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
    return subprocess.Popen(
        hosts.command(host, ["lockstep", "train", TINY, "--timeout", "3", "--n_steps", "4", "--out", "here"]),
        cwd=folder, env=environment(**{**group, "MASTER_PORT": "29500", **variables}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


WRONG = {
    "closed port": (
        {},
        f"at {ADDRESSES[0]}:29500 within 3 s (--timeout): Connection refused; nothing listens",
    ),
    "no such machine": ({"MASTER_ADDR": "10.77.0.9"}, "at 10.77.0.9:29500 within 3 s (--timeout): "),
    "no route": ({"MASTER_ADDR": "10.99.0.1"}, "Network is unreachable; that machine does not answer: is the address"),
    "no such name": ({"MASTER_ADDR": "nowhere.invalid"}, "give a name or an address that this machine knows"),
    "no such interface": ({"GLOO_SOCKET_IFNAME": "eth7"}, "GLOO_SOCKET_IFNAME is eth7, but this machine has lo, ls1-"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_keeps_a_rank_from_the_others_is_named_within_the_timeout(hosts: Hosts, what: str, tmp_path: Path) -> None:
    variables, text = WRONG[what]
    process = alone(hosts, 1, tmp_path, **variables)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert errors.startswith("lockstep: rank 1: ") and text in errors and errors.count("\n") == 1, errors


def test_an_interface_that_does_not_reach_the_others_is_named(hosts: Hosts, tmp_path: Path) -> None:
    ranks = [alone(hosts, host, tmp_path, GLOO_SOCKET_IFNAME="lo") for host in range(2)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    for error in errors:
        assert "have met at 10.77.0.1:29500 but cannot connect to each other over lo: set GLOO_SOCKET_IFNAME" in error


def test_gloo_finds_its_interface(hosts: Hosts, tmp_path: Path) -> None:
    ranks = [alone(hosts, host, tmp_path) for host in range(2)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
