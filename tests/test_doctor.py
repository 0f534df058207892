"""`lockstep doctor`: each check on machines that are made up, and the command on this one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.commands import doctor as command
from lockstep.doctor import environment, gpus, hosts, machine, ranks, versions, workload
from lockstep.doctor.check import Result, attempt, green
from lockstep.flags import parse
from lockstep.registry import find

TINY = f"{tiny.__file__}:Tiny"
GIB = 2**30
H100 = versions.Versions(
    (3, 12), "2.11.0+cu130", "13.0", "2.28.9", 8, 8, "580.95", (13, 0), ((9, 0),), ("sm_80", "sm_90")
)
GOOD = machine.Machine(16, 64 * GIB, 32 * GIB, 65_536, 65_536, 500 * GIB, 1e9, "runs")


def bad(results: list[Result]) -> dict[str, str]:
    """The checks that are not green, by name; every one has a remedy."""
    assert all(result.found and (result.level == "green") == (not result.remedy) for result in results)
    return {result.name: result.level for result in results if result.level != "green"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"python": (3, 10)}, {"Python": "red"}),
        ({"python": (3, 14)}, {"Python": "red"}),
        ({"torch": "2.9.1"}, {"torch": "red"}),
        ({"torch": "2.13.0a0+git1"}, {}),
        ({"cuda": None, "gpus_of_torch": 0, "capabilities": ()}, {"CUDA": "red"}),  # a CPU build beside a GPU
        ({"cuda": None, "gpus_in_machine": 0, "gpus_of_torch": 0, "capabilities": ()}, {}),  # no GPU at all
        ({"driver_cuda": (12, 4)}, {"CUDA": "red"}),
        ({"cuda": "12.8"}, {}),  # a newer driver runs older CUDA
        ({"driver": None, "driver_cuda": None}, {}),  # without nvidia-ml-py
        ({"gpus_of_torch": 0, "capabilities": ()}, {"CUDA": "red"}),
        ({"capabilities": ((12, 0),)}, {"kernels": "red"}),
        ({"capabilities": ((12, 0),), "architectures": ("sm_90", "compute_90")}, {}),
        ({"capabilities": ((8, 9),)}, {}),  # kernels of sm_80 run on it
        ({"capabilities": ((7, 5),), "architectures": ("sm_75",)}, {"kernels": "yellow"}),  # RTX 2080 Ti
        ({"nccl": None}, {"NCCL": "red"}),
    ],
)
def test_versions_that_do_not_fit_are_found(change: dict[str, Any], expected: dict[str, str]) -> None:
    assert bad(versions.check(replace(H100, **change))) == expected


def test_gpus_that_are_used_slowed_or_broken_are_found() -> None:
    free = gpus.Gpu(0, "H100", 80 * GIB, 1 * GIB)
    assert bad(gpus.check(gpus.Gpus())) == bad(gpus.check(gpus.Gpus((free,)))) == {}
    used = replace(free, index=1, used=70 * GIB, processes=("python (pid 4711)",))
    (result,) = [r for r in gpus.check(gpus.Gpus((free, used))) if r.level == "red"]
    assert result.name == "GPU 1" and "pid 4711" in result.found and "CUDA_VISIBLE_DEVICES" in result.remedy
    assert bad(gpus.check(gpus.Gpus((replace(free, used=20 * GIB),)))) == {"GPU 0": "yellow"}
    assert bad(gpus.check(gpus.Gpus((replace(free, slowed="heat"),)))) == {"GPU 0": "yellow"}
    assert bad(gpus.check(gpus.Gpus((replace(free, errors=2),)))) == {"GPU 0": "red"}
    assert bad(gpus.check(gpus.Gpus((free, replace(free, name="A100"))))) == {"GPUs": "yellow"}
    assert bad(gpus.check(gpus.Gpus((free, free), ((0, 1),)))) == {"peer access": "yellow"}
    assert bad(gpus.check(gpus.Gpus((free,), detailed=False))) == {"NVML": "yellow"}


@pytest.mark.parametrize(
    ("change", "ranks_", "expected"),
    [
        ({}, 8, {}),
        ({"cores": 8}, 8, {"CPU cores": "yellow"}),
        ({"load": 40.0}, 1, {"CPU cores": "yellow"}),
        ({"memory": GIB}, 1, {"memory": "red"}),
        ({"shared_memory": 64 * 2**20}, 1, {"shared memory": "red"}),  # a container without --shm-size
        ({"shared_memory": 2 * GIB}, 8, {"shared memory": "yellow"}),
        ({"shared_memory": None}, 8, {}),
        ({"open_files": 1024}, 1, {"open files": "yellow"}),
        ({"open_files": 256, "open_files_hard": 256}, 1, {"open files": "red"}),
        ({"disk_free": GIB // 2}, 1, {"disk": "red"}),
        ({"disk_free": 5 * GIB}, 1, {"disk": "yellow"}),
        ({"disk_speed": 10e6}, 1, {"disk speed": "yellow"}),
        ({"disk_speed": None}, 1, {"disk speed": "red"}),
        ({"port_owner": "python (pid 4711)"}, 1, {"ports": "yellow"}),
        ({"free_ports": False}, 1, {"ports": "red"}),
        ({"host_address": None}, 1, {"host name": "yellow"}),
    ],
)
def test_limits_of_a_machine_are_found(change: dict[str, Any], ranks_: int, expected: dict[str, str]) -> None:
    assert bad(machine.check(replace(GOOD, **change), ranks_)) == expected


def test_facts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    found = machine.read(tmp_path / "not" / "there")
    assert found.runs == str(tmp_path) and found.disk_speed and found.cores >= 1 and found.open_files > 0
    assert not list(tmp_path.iterdir())
    assert versions.read().torch and isinstance(gpus.read(), gpus.Gpus)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PATH": "/bin", "NCCL_DEBUG": "WARN"}, {}),
        ({"NCCL_TIMEOUT": "3600"}, {"NCCL_TIMEOUT": "yellow"}),
        ({"NCCL_BLOCKING_WAIT": "1"}, {"NCCL_BLOCKING_WAIT": "yellow"}),
        ({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "yellow"}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "yellow"}),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {}),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": "yellow"}),
        ({"OMP_NUM_THREADS": "64"}, {"OMP_NUM_THREADS": "yellow"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "yellow"}),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, {"CUDA_VISIBLE_DEVICES": "red"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES": "red"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {}),
        ({"GLOO_SOCKET_IFNAME": "ib7"}, {"GLOO_SOCKET_IFNAME": "red"}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {}),  # NCCL takes a prefix
        ({"NCCL_SOCKET_IFNAME": "^docker"}, {}),
        ({"NCCL_SOCKET_IFNAME": "ib"}, {"NCCL_SOCKET_IFNAME": "red"}),
        ({"RANK": "0"}, {"rank variables": "red"}),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"rank variables": "yellow"}),
        ({"LOCKSTEP_SMOKE": "3"}, {"LOCKSTEP_SMOKE": "yellow"}),
    ],
)
def test_variables_without_effect_or_that_do_harm_are_found(
    variables: dict[str, str], expected: dict[str, str]
) -> None:
    assert bad(environment.check(variables, cores=16, gpus=2, interfaces=["lo", "eth0"])) == expected


def test_an_all_reduce_that_fails_is_wrong_or_slow_is_found() -> None:
    good = ranks.AllReduce("nccl", 8, True, 300e9, 30e-6)
    assert ranks.check(good).level == "green"
    assert ranks.check(replace(good, right=False)).level == "red"
    assert ranks.check(replace(good, bandwidth=1e9)).level == "yellow"
    assert ranks.check(None).level == "red"


SPEED = workload.Speed(0.1, 0.0, 0.05, 0.0, 32, 4, 64, 4, False)


def test_the_verdict_names_what_limits_training_and_the_number_of_workers() -> None:
    assert workload.verdict(SPEED).found.startswith("compute-bound")
    starved = workload.verdict(replace(SPEED, data_wait=0.4, loading=1.0))
    assert starved.found == "data-bound: 80% of a step is waiting for data"
    assert starved.remedy == "--num_workers 12"  # 1.0 s of loading, 0.1 s of computation, and 20 % to spare
    few = workload.verdict(replace(SPEED, data_wait=0.4, loading=1.0, cores=16))
    assert few.remedy.startswith("--num_workers 3; each of 4 rank(s) needs 12 loader process(es), on 16 core(s)")
    waiting = workload.verdict(replace(SPEED, all_reduce=0.2))
    assert waiting.found == "communication-bound: 57% of a step on 4 ranks is all-reduce"
    assert workload.verdict(replace(SPEED, all_reduce=0.06)).level == "green"  # hidden behind the backward pass


def test_a_check_that_fails_by_itself_does_not_end_the_others() -> None:
    def broken() -> Result:
        raise RuntimeError("no driver\nat all")

    def wrong() -> Result:
        raise ValueError("there is no file x")

    (result,) = attempt("GPUs", broken)
    assert result.level == "yellow" and "no driver" in result.found and "at all" not in result.found
    assert [r.level for r in attempt("data", wrong)] == ["red"]
    assert attempt("fine", lambda: green("fine", "yes")) == [green("fine", "yes")]


def test_a_recipe_is_timed_and_judged_on_this_machine() -> None:
    request = parse(find(TINY), ["--device", "cpu", "--batch_size", "16"], "test")
    found = {result.name: result for result in workload.check(request, 1e9, 2, 4)}
    assert found["data set"].found == "997 samples" and "samples/s" in found["step"].found
    assert "-bound" in found["verdict"].found
    small = parse(find(TINY), ["--device", "cpu", "--batch_size", "2000"], "test")
    (result,) = workload.check(small, 1e9, 2, 4)
    assert result.level == "red" and "997 samples, fewer than the batch of 2000" in result.found


def peer(**change: Any) -> hosts.Peer:
    return replace(hosts.Peer("b", "", True, 1e-4, 0.01, 1.2e9, hosts.own_versions()), **change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"error": "Connection refused"}, {"b": "red"}),
        ({"other_port": False}, {"b ports": "red"}),
        ({"bandwidth": 1e7}, {"b speed": "yellow"}),
        ({"skew": -3.0}, {"b clock": "yellow"}),
        ({"skew": 3600.0}, {"b clock": "red"}),
        ({"versions": {**hosts.own_versions(), "torch": "2.9"}}, {"b versions": "yellow"}),
    ],
)
def test_what_is_wrong_between_machines_is_found(change: dict[str, Any], expected: dict[str, str]) -> None:
    assert bad(hosts.check([peer(**change)], 29400)) == expected


def test_a_machine_answers_with_versions_and_clock_and_takes_bytes() -> None:
    """The two ends of the protocol, on the loopback: nothing else can be known of a port that was just free."""
    with hosts.socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = hosts.Server(port)
    try:
        found = hosts._examine("127.0.0.1", "a", port, hosts.time.monotonic() + 30)
        server.wait({"a"}, hosts.time.monotonic() + 30)
        assert server._finished == {"a"}
    finally:
        server.close()
    assert not found.error and found.other_port and found.bandwidth > 0 and abs(found.skew) < 5
    assert found.versions == hosts.own_versions()


def test_hosts_must_name_this_machine_once() -> None:
    assert hosts.find_self(["127.0.0.1", "192.0.2.7"]) == 0
    with pytest.raises(ValueError, match="none of them is this machine"):
        hosts.find_self(["192.0.2.7", "192.0.2.8"])
    with pytest.raises(ValueError, match="are both this machine"):
        hosts.find_self(["127.0.0.1", "127.0.0.2"])


@pytest.mark.parametrize("reduced", [ranks.AllReduce("gloo", 2, True, 1e9, 1e-4), None])
def test_the_command_prints_every_group_and_exits_with_1_on_red(
    reduced: ranks.AllReduce | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_all_reduce", lambda count: reduced)
    monkeypatch.setattr(machine, "read", lambda runs: GOOD)
    assert command.run([]) == int(reduced is None)
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("versions", "GPUs", "machine", "environment", "communication"))
    assert ("1 red" in shown) == (reduced is None) and ("→" in shown) == (reduced is None)
    assert command.run(["--json"]) == int(reduced is None)
    groups = json.loads(capsys.readouterr().out)
    assert {result["level"] for result in groups["machine"]} == {"green"}


def test_flags_of_training_need_a_recipe() -> None:
    with pytest.raises(ValueError, match="come after a RECIPE"):
        command.run(["--batch_size", "4"])


@pytest.mark.slow
def test_two_ranks_of_this_machine_sum_right() -> None:
    found = command._all_reduce(2)
    assert found is not None and found.right and found.ranks == 2 and found.bandwidth > 0
