"""The same run on several numbers of GPUs: global batch, learning rate, time, speed-up."""

from dataclasses import dataclass

from ..batching import Batching
from ..config import TrainConfig
from ..optim import scaled_lr
from .measure import Measured
from .predict import Machines, StepTime, predict


@dataclass(frozen=True)
class Scaled:
    """A run on one number of GPUs."""

    machines: Machines
    batching: Batching
    step: StepTime
    compiled: bool
    lr: float
    """With the flags as they are."""
    lr_linear: float
    """That of one GPU times the ratio of the global batches."""
    lr_sqrt: float
    speed_up: float
    """Samples per second, compared with one GPU."""
    days: float
    """For as many samples as the run has on one GPU."""

    @property
    def samples_per_second(self) -> float:
        return self.batching.global_batch / self.step.total

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.machines.world


def scale(measured: Measured, config: TrainConfig, machines: list[Machines], correction: float = 1.0) -> list[Scaled]:
    """Return the run on each of `machines`."""
    one = _batching(measured, config, 1)
    single, _ = _step(measured, config, Machines(machines[0].gpu), one, correction)
    base, samples = one.global_batch / single.total, one.n_steps * one.global_batch
    lr = scaled_lr(config.optim, one.global_batch)
    found = []
    for some in machines:
        batching = _batching(measured, config, some.world)
        step, compiled = _step(measured, config, some, batching, correction)
        rate, ratio = batching.global_batch / step.total, batching.global_batch / one.global_batch
        own = scaled_lr(config.optim, batching.global_batch)
        found.append(
            Scaled(
                some, batching, step, compiled, own, lr * ratio, lr * ratio**0.5, rate / base, samples / rate / 86_400
            )
        )
    return found


def _batching(measured: Measured, config: TrainConfig, world: int) -> Batching:
    try:
        return Batching.plan(config.data, measured.dataset, world)
    except ValueError as error:
        raise ValueError(f"on {world} GPU(s): {error}") from None


def _step(
    measured: Measured, config: TrainConfig, machines: Machines, batching: Batching, correction: float
) -> tuple[StepTime, bool]:
    """Return the time of a step, and whether it is compiled: BatchNorm over ranks is not."""
    hardware, world = config.hardware, machines.world
    synchronised = measured.batch_norm and world > 1 and hardware.sync_bn != "off" and not hardware.exact
    compiled = hardware.compile != "off" and not synchronised
    precision = "bf16" if hardware.precision == "auto" else hardware.precision
    step = predict(measured, machines, batching.micro_batch, batching.accumulation, precision, compiled, correction)
    return step, compiled
