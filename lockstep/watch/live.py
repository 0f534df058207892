"""What the ranks of a running job do now, in a file of the run folder that `lockstep top` shows.

    live.json   {"time": 1700000000.0, "ranks": [{"rank": 0, "phase": "step", "step": 120, ...}, ...]}

The thread of the hang watch writes it every few seconds. A file that cannot be written is no reason to stop.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .diagnosis import RankState

FILE = "live.json"


@dataclass
class DeviceLoad:
    """How much of its device a rank uses."""

    memory: int = 0
    """Bytes: on a GPU those that the process has reserved, on a CPU its resident memory."""
    memory_total: int = 0
    utilization: int | None = None
    """Per cent of the time in which the GPU ran a kernel; None without NVML."""


def device_load(device: torch.device) -> DeviceLoad:
    """Return the load of a device, without waiting for it."""
    if device.type != "cuda":
        with suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return DeviceLoad(pages * os.sysconf("SC_PAGE_SIZE"), total)
        return DeviceLoad()
    load = DeviceLoad(torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory)
    with suppress(Exception):  # nvidia-ml-py is not installed, or the driver does not answer
        load.utilization = torch.cuda.utilization(device)
    return load


def load_text(device: torch.device) -> str:
    """Return the memory and the utilization of a GPU for a line of the console; nothing for a CPU."""
    if device.type != "cuda":
        return ""
    load = device_load(device)
    busy = "" if load.utilization is None else f" {load.utilization}%"
    return f"GPU {load.memory / 1e9:.1f}/{load.memory_total / 1e9:.0f} GB{busy}"


def write_live(folder: Path, states: Iterable[RankState]) -> None:
    """Write the file, in place: a temporary one beside it would stay behind when the process is killed."""
    ranks = [live_facts(state) for state in sorted(states, key=lambda state: state.rank)]
    with suppress(OSError):
        (folder / FILE).write_text(json.dumps({"time": time.time(), "ranks": ranks}))


def remove_live(folder: Path) -> None:
    with suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)


def live_facts(state: RankState) -> dict[str, Any]:
    """Return what others want to know of a rank that is at work."""
    return {
        "rank": state.rank,
        "done": state.done,
        "phase": state.phase,
        "step": state.step,
        "idle": round(state.idle, 1),
        "data_seconds": round(state.data_seconds, 3),
        "memory": state.memory,
        "memory_total": state.memory_total,
        "utilization": state.utilization,
        "beat": state.beat,
        "host": state.process.get("host", ""),
        "pid": state.process.get("pid", 0),
    }


def read_live(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if there is none. One that is being written is read again."""
    for _ in range(5):
        try:
            content = json.loads((folder / FILE).read_text())
            return content if isinstance(content, dict) and isinstance(content.get("ranks"), list) else None
        except OSError:
            return None
        except ValueError:
            threading.Event().wait(0.02)
    return None
