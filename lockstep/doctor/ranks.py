"""An all-reduce between real ranks of this machine: is the sum right, and how fast is it?"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import distributed
from .check import Result, green, red, yellow

_ELEMENTS = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
"""float32 numbers that are summed."""
_REPEATS = 5
_SLOW = {"nccl": 3e9, "gloo": 0.2e9}
"""Bytes per second below which something is wrong with the links."""


@dataclass(frozen=True)
class AllReduce:
    """What rank 0 has seen."""

    backend: str
    ranks: int
    right: bool
    bandwidth: float
    """Bus bandwidth, bytes per second: 2 (N − 1) / N × bytes / seconds."""
    latency: float
    """Seconds of an all-reduce of one number."""


def work(folder: Path, device: str) -> int:
    """As one rank: sum numbers over all ranks, and let rank 0 write what came of it to `folder`."""
    with distributed.session(device, timeout=60.0) as world:
        count = torch.arange(_ELEMENTS[world.device.type], device=world.device) % 1000
        # Whole numbers below 2^24: their sums are exact in float32, whatever the order.
        numbers, ranks = (count * (world.rank + 1)).float(), world.size
        total = world.sum(numbers.clone())
        right = bool((total == (count * (ranks * (ranks + 1) // 2)).float()).all())
        right = not world.any(not right)
        seconds = _time(world, numbers)
        latency = _time(world, torch.zeros(1, device=world.device))
        if world.is_main:
            size = numbers.numel() * numbers.element_size()
            bandwidth = 2 * (ranks - 1) / ranks * size / seconds
            found = AllReduce(world.backend, ranks, right, bandwidth, latency)
            (folder / "all_reduce.json").write_text(json.dumps(asdict(found)))
    return 0


def _time(world: distributed.World, tensor: torch.Tensor) -> float:
    """Return the seconds of one all-reduce, the fastest of some."""
    times = []
    for _ in range(_REPEATS):
        world.barrier()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        world.sum(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def read(folder: Path) -> AllReduce | None:
    """Return what the ranks have written; None if they failed."""
    path = folder / "all_reduce.json"
    return AllReduce(**json.loads(path.read_text())) if path.is_file() else None


def check(found: AllReduce | None) -> Result:
    name = "all-reduce"
    if found is None:
        remedy = "the message above says why; NCCL_DEBUG=INFO lockstep doctor shows what NCCL did; see /dev/shm above"
        return red(name, "the ranks did not come to an end", remedy)
    text = (
        f"{found.ranks} ranks, {found.backend}: {found.bandwidth / 1e9:.2g} GB/s, {found.latency * 1e6:,.0f} µs for "
        "one number"
    )
    if not found.right:
        remedy = "a GPU, its memory or a link computes wrongly: restart the machine, and leave the GPU out"
        return red(name, f"the sum is WRONG ({text})", remedy)
    if found.bandwidth < _SLOW.get(found.backend, 0.0):
        remedy = "gradients will wait for it: see peer access and NCCL variables; on a CPU, fewer other processes"
        return yellow(name, f"the sum is right, but slow ({text})", remedy)
    return green(name, f"the sum is right; {text}")
