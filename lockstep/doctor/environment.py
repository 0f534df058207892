"""Environment variables that do nothing, slow a run down, or break it."""

import socket
from collections.abc import Collection, Mapping

from .check import Result, green, red, yellow

_NOTHING = {
    "NCCL_TIMEOUT": "it is read by nothing; use --timeout (in a script of your own: init_process_group(timeout=...))",
    "NCCL_BLOCKING_WAIT": "torch reads TORCH_NCCL_BLOCKING_WAIT instead",
    "NCCL_ASYNC_ERROR_HANDLING": "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING instead, and it is on by default",
    "NCCL_DESYNC_DEBUG": "torch reads TORCH_NCCL_DESYNC_DEBUG instead",
}
"""By name, what to use instead."""
_SLOW: dict[str, tuple[Collection[str], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the GPU waits for every kernel; it is for finding the line of a CUDA error"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one; unset it when you are done"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs no longer reach one another's memory; unset it unless NCCL hangs without"),
    "NCCL_IB_DISABLE": (("1",), "machines talk over Ethernet although there may be InfiniBand"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs of one machine talk over sockets; unset it, and give /dev/shm more room"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "it prints much in every run; unset it once NCCL works"),
    "TORCHDYNAMO_DISABLE": (("1",), "nothing is compiled; use --compile off where that is meant"),
    "TORCH_COMPILE_DISABLE": (("1",), "nothing is compiled; use --compile off where that is meant"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is allocated by the driver, several times slower"),
    "PYTORCH_JIT": (("0",), "TorchScript functions run as plain Python"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host waits for every collective; Lockstep detects hangs without"),
}
"""By name, the values that slow a run down, and how."""
_ALL_OR_NONE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check(
    environment: Mapping[str, str], cores: int, gpus: int, interfaces: Collection[str] | None = None
) -> list[Result]:
    """Return one result for each variable that matters, or a green one if there is none."""
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    found = [
        *_without_effect(environment), *_slow(environment), *_threads(environment, cores), *_visible(environment, gpus),
        *_interfaces(environment, interfaces), *_left_over(environment),
    ]  # fmt: skip
    return found or [green("environment", "no variable does harm")]


def _without_effect(environment: Mapping[str, str]) -> list[Result]:
    return [
        yellow(name, f"{environment[name]} has no effect", instead)
        for name, instead in _NOTHING.items()
        if environment.get(name)
    ]


def _slow(environment: Mapping[str, str]) -> list[Result]:
    return [
        yellow(name, f"{environment[name]}: {why}", f"unset {name}")
        for name, (values, why) in _SLOW.items()
        if environment.get(name, "").upper() in values
    ]


def _threads(environment: Mapping[str, str], cores: int) -> list[Result]:
    value = environment.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > cores:
        what = f"{value} threads in each process, on {cores} core(s)"
        return [yellow("OMP_NUM_THREADS", what, "unset it: lockstep train --nproc divides the cores among the ranks")]
    return []


def _visible(environment: Mapping[str, str], gpus: int) -> list[Result]:
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return []
    if not value.strip() or value.strip() == "-1":
        return [yellow("CUDA_VISIBLE_DEVICES", "is empty: no GPU is used", "unset it, or name GPUs: 0,1")]
    named = [part.strip() for part in value.split(",")]
    if len(set(named)) < len(named):
        return [red("CUDA_VISIBLE_DEVICES", f"{value} names a GPU twice", "name each of them once")]
    if len(named) > gpus:
        remedy = "nvidia-smi lists the GPUs; all after the first unknown one are ignored"
        return [red("CUDA_VISIBLE_DEVICES", f"{value} names {len(named)} GPU(s), and {gpus} are there", remedy)]
    return [green("CUDA_VISIBLE_DEVICES", value)]


def _interfaces(environment: Mapping[str, str], existing: Collection[str]) -> list[Result]:
    results = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environment.get(name, "")
        if not wanted or wanted.startswith(("^", "=")):
            continue
        chosen = wanted.split(",")
        prefix = name.startswith("NCCL")  # NCCL takes eth for eth0
        missing = [c for c in chosen if not any(e.startswith(c) if prefix else e == c for e in existing)]
        if missing:
            what = f"{wanted}, but this machine has {', '.join(existing)}"
            results.append(red(name, what, "set it to the interface that reaches the other machines, or unset it"))
    return results


def _left_over(environment: Mapping[str, str]) -> list[Result]:
    results, given = [], [name for name in _ALL_OR_NONE if environment.get(name)]
    missing = [name for name in _ALL_OR_NONE if not environment.get(name)]
    if {"RANK", "WORLD_SIZE"} & set(given) and missing:
        what = f"{', '.join(given)} set without {', '.join(missing)}"
        results.append(red("rank variables", what, "unset them: torchrun and lockstep train --nproc set them all"))
    elif {"RANK", "WORLD_SIZE"} <= set(given):
        what = f"RANK={environment['RANK']} of {environment['WORLD_SIZE']}: every command is one of several processes"
        results.append(yellow("rank variables", what, "unset them, unless a debugger or scheduler has set them"))
    if environment.get("LOCKSTEP_SMOKE"):
        what = f"{environment['LOCKSTEP_SMOKE']}: every run is a trial of so many steps"
        results.append(yellow("LOCKSTEP_SMOKE", what, "unset LOCKSTEP_SMOKE"))
    return results
