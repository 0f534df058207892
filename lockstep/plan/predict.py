"""Seconds of a step on N GPUs, from the work of a micro-batch and the figures of a GPU.

    device time = FLOPs / (peak × PRODUCTS) + (product traffic + FUSED × other traffic) / (bandwidth × TRAFFIC)
    host time   = operators × LAUNCH
    computation = accumulation × max(device, host) + optimizer and averages: bytes / (bandwidth × UPDATE)
    all-reduce  = 2 (N − 1) / N × bytes of gradients / bus bandwidth + 2 (N − 1) × LATENCY
    step        = computation + what of the all-reduce the last backward pass does not hide

The constants are fitted to steps measured on an H200; docs/plan.md has them beside the predictions.
"""

from dataclasses import dataclass

from .hardware import Gpu
from .measure import Measured

PRODUCTS = 0.65
"""Share of the data sheet's peak that matrix products reach, beside their own traffic."""
FUSED = 0.15
"""Share of the traffic of all other operators that is left when a compiler has fused them."""
TRAFFIC = 0.6
"""Share of the data sheet's bandwidth that kernels reach."""
UPDATE = 0.75
"""The same of the fused optimizer, which reads and writes long vectors."""
LAUNCH = {True: 8e-6, False: 24e-6}
"""Seconds of the host for each operator of the model, compiled or not."""
LATENCY = 20e-6
"""Seconds of each of the 2 (N − 1) messages of a ring."""
BACKWARD = 2 / 3
"""Share of forward and backward that is the backward pass."""
BUCKET = 25 * 2**20
"""Bytes of DDP's buckets: the last one is sent when nothing is left to hide it."""


@dataclass(frozen=True)
class Machines:
    """GPUs of one kind, `gpus` of them in each of `nodes` machines."""

    gpu: Gpu
    gpus: int = 1
    nodes: int = 1

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def bus(self) -> float:
        """Bytes per second of an all-reduce: that of the slowest part of the ring."""
        links = [*[self.gpu.link] * (self.gpus > 1), *[self.gpu.network] * (self.nodes > 1)]
        return min(links, default=float("inf"))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    device: float
    """Forward and backward of all its micro-batches, on the device."""
    host: float
    """The same on the host, which calls the operators: a step is at least as long."""
    update: float
    """Optimizer and averages."""
    all_reduce: float
    exposed: float
    """What of the all-reduce is not hidden behind the backward pass."""

    @property
    def computation(self) -> float:
        return max(self.device, self.host) + self.update

    @property
    def total(self) -> float:
        return self.computation + self.exposed

    @property
    def bound(self) -> str:
        """What limits the step."""
        if self.exposed > 0.3 * self.total:
            return "all-reduce"
        return "launch" if self.host > self.device else "compute"


def predict(
    measured: Measured, machines: Machines, micro_batch: float, accumulation: int, precision: str, compiled: bool,
    correction: float = 1.0,
) -> StepTime:  # fmt: skip
    """Return the seconds of a step; `correction`: measured computation divided by predicted, where it was measured."""
    work, gpu = measured.at(micro_batch), machines.gpu
    peak = gpu.single if precision == "fp32" else gpu.half
    traffic = work.product_traffic + (FUSED if compiled else 1.0) * work.traffic
    device = work.flops / (peak * PRODUCTS) + traffic / (gpu.bandwidth * TRAFFIC)
    host = work.operators * LAUNCH[compiled]
    # Read weights, gradients and state, write weights and state; an average reads both and writes itself.
    touched = 3 * measured.gradients + 2 * measured.optimizer_state + 3 * measured.averages
    update = touched / (gpu.bandwidth * UPDATE)
    world = machines.world
    ring = 2 * (world - 1) / world * measured.gradients / machines.bus + 2 * (world - 1) * LATENCY if world > 1 else 0.0
    last_bucket = ring * min(1.0, BUCKET / max(1.0, measured.gradients))
    hidden = BACKWARD * max(device, host) * correction
    return StepTime(
        device=accumulation * device * correction,
        host=accumulation * host * correction,
        update=update * correction,
        all_reduce=ring,
        exposed=max(ring - hidden, last_bucket),
    )
