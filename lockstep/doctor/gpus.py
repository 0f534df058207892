"""The GPUs that a run would use: memory, other processes, errors, throttling, peer access."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from .check import Result, green, red, size, yellow
from .nvml import nvml

BUSY = 0.05
"""Share of a GPU's memory that other processes may use unnoticed."""


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    index: int
    name: str
    total: float
    used: float
    processes: tuple[str, ...] = ()
    """Of others: "python (pid 4711)"."""
    slowed: str = ""
    """Why its clock is lowered; empty if it is not."""
    errors: int = 0
    """Memory errors that were not corrected, since the machine was started."""


@dataclass(frozen=True)
class Gpus:
    """All visible GPUs."""

    devices: tuple[Gpu, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    detailed: bool = True
    """Whether the driver was asked (nvidia-ml-py)."""


def read() -> Gpus:
    """Return what torch sees, with what the driver says of it."""
    count = torch.cuda.device_count()
    if not count:
        return Gpus()
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    apart = tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))
    with suppress(Exception), nvml() as found:
        return Gpus(tuple(_from_driver(found, i) for i in range(count)), apart)
    return Gpus(tuple(_from_torch(i) for i in range(count)), apart, detailed=False)


def _from_torch(index: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(index, torch.cuda.get_device_name(index), total, total - free)


def _from_driver(found: Any, index: int) -> Gpu:
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    handle = found.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    memory, errors, slowed = found.nvmlDeviceGetMemoryInfo(handle), 0, ""
    with suppress(Exception):  # not every GPU counts errors
        kinds = found.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, found.NVML_VOLATILE_ECC
        errors = found.nvmlDeviceGetTotalEccErrors(handle, *kinds)
    with suppress(Exception):
        slowed = _reasons(found, found.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    processes = found.nvmlDeviceGetComputeRunningProcesses(handle)
    others = tuple(_process(p.pid) for p in processes if p.pid != os.getpid())
    name = torch.cuda.get_device_name(index)
    return Gpu(index, name, memory.total, memory.used, others, slowed, errors)


def _reasons(found: Any, bits: int) -> str:
    kinds: Mapping[str, str] = {
        "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
        "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
        "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply",
    }
    return ", ".join(sorted({text for name, text in kinds.items() if bits & getattr(found, name, 0)}))


def _process(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (pid {pid})"
    return f"pid {pid}"  # in another container


def check(found: Gpus) -> list[Result]:
    if not found.devices:
        return [green("GPUs", "none is visible to torch")]
    results = [_devices(found), *(_memory(gpu) for gpu in found.devices), *_health(found)]
    if len(found.devices) > 1:
        results.append(_peers(found))
    if not found.detailed:
        remedy = "pip install nvidia-ml-py, to see processes, temperature and memory errors"
        results.append(yellow("NVML", "the driver was not asked for more than torch knows", remedy))
    return results


def _devices(found: Gpus) -> Result:
    names = sorted({gpu.name for gpu in found.devices})
    text = ", ".join(f"{sum(gpu.name == name for gpu in found.devices)} × {name}" for name in names)
    if len(names) > 1:
        return yellow("GPUs", text, "every step waits for the slowest: choose GPUs of one kind by CUDA_VISIBLE_DEVICES")
    return green("GPUs", text)


def _memory(gpu: Gpu) -> Result:
    name, text = f"GPU {gpu.index}", f"{size(gpu.used)} of {size(gpu.total)} in use"
    if gpu.used <= BUSY * gpu.total:
        return green(name, text)
    by = f" by {', '.join(gpu.processes)}" if gpu.processes else ""
    remedy = "end these processes (nvidia-smi shows them), or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return (red if gpu.used > 0.5 * gpu.total else yellow)(name, text + by, remedy)


def _health(found: Gpus) -> list[Result]:
    results = []
    for gpu in found.devices:
        if gpu.slowed:
            what = f"its clock is lowered because of {gpu.slowed}"
            results.append(yellow(f"GPU {gpu.index}", what, "check cooling and power: every rank waits for this one"))
        if gpu.errors:
            what = f"{gpu.errors} memory error(s) that were not corrected"
            results.append(red(f"GPU {gpu.index}", what, "restart the machine; if they come again, replace the GPU"))
    return results


def _peers(found: Gpus) -> Result:
    if not found.no_peer_access:
        return green("peer access", "all GPUs reach one another's memory")
    pairs = ", ".join(f"{a}-{b}" for a, b in found.no_peer_access[:6])
    remedy = "usual for GeForce cards; NCCL then copies through host memory, and needs more /dev/shm"
    return yellow("peer access", f"none between GPUs {pairs}", remedy)
