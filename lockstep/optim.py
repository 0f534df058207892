"""The update: optimizer, learning rate, and the way from summed gradients to a step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .config import Optim
from .distributed import World
from .precision import Scaler
from .stream import Sizes


def build(optim: Optim, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the flags describe. Fused ones also skip a bad step on the device itself."""
    parameters = list(parameters)
    if optim.optimizer == "sgd":
        sgd = torch.optim.SGD(parameters, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=True)
        if optim.momentum:  # torch leaves the buffer unset until a step is taken, and a skipped first step takes none
            for parameter in parameters:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(parameters, optim.lr, betas, weight_decay=optim.weight_decay, fused=True)


def scaled_lr(optim: Optim, global_batch: int) -> float:
    """The learning rate for this global batch: it follows the batch, never the number of GPUs."""
    ratio = global_batch / optim.base_batch_size
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.lr_scaling]


class Schedule:
    """The learning rate of a step, as a factor of the full one. It follows from the step, and from `drops` alone."""

    def __init__(self, optim: Optim, sizes: Sizes):
        self.kind = optim.schedule
        self.warmup = optim.warmup_steps + round(optim.warmup_epochs * sizes.steps_per_epoch)
        self.length = max(1, sizes.n_steps - self.warmup)
        self.floor = optim.min_lr / optim.lr if optim.lr else 0.0
        self.decay_steps, self.decay_factor, self.decay_patience = (
            optim.decay_steps, optim.decay_factor, optim.decay_patience,
        )  # fmt: skip
        self.drops = 0
        """Of a plateau: how often evaluations without improvement have lowered the rate."""

    def __call__(self, step: int) -> float:
        """`step` counts from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / self.length)
        if self.kind == "cosine":
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "linear":
            return self.floor + (1 - self.floor) * (1 - done)
        if self.kind == "step":
            return self.decay_factor ** ((step - self.warmup) // self.decay_steps)
        return max(self.floor, self.decay_factor**self.drops) if self.kind == "plateau" else 1.0

    def evaluated(self, bad_evaluations: int) -> None:
        """Take note of how many evaluations in a row have brought nothing."""
        if self.kind == "plateau" and bad_evaluations and bad_evaluations % self.decay_patience == 0:
            self.drops += 1


class Update:
    """From a loss that is a sum to one step of the optimizer, without waiting for the device.

    Every micro-batch's sum is multiplied by what is known beforehand (`scale`), gradients add up over micro-batches
    and ranks, and `step` multiplies them once by what is known only then: the weight of the global batch, the
    fp16 scale, the clipping. A gradient that is not finite, seen alike by all ranks, leaves everything as it was.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        sizes: Sizes,
        lr_ratio: float,
        clip: float,
        scaler: Scaler | None,
        world: World,
    ):
        self.optimizer, self.schedule, self.sizes, self.scaler = optimizer, schedule, sizes, scaler
        self.clip, self.world = clip, world
        self.full_lr = [group["lr"] * lr_ratio for group in optimizer.param_groups]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.norm = torch.zeros((), device=world.device)
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=world.device)
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=world.device)
        self._skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._weight: Tensor | None = None
        self.per_sample: float | None = None
        """What a sample weighs, where that is a Python number: the same in every micro-batch and on every rank."""

    def loss(self, total: Tensor, weight: float | Tensor, samples: int) -> Tensor:
        """What to call backward on: this micro-batch's part of the mean over the global batch."""
        factor: float | Tensor = 1 / self.sizes.global_batch
        if isinstance(weight, Tensor):
            self._weight = weight.detach() if self._weight is None else self._weight + weight.detach()
        else:
            if self.per_sample is None:
                self.per_sample = weight / samples
            if not math.isclose(weight, self.per_sample * samples, rel_tol=1e-9):
                raise ValueError(
                    f"a loss's weight that is a Python number is the same for every sample; {weight:g} for {samples} "
                    f"samples is not {self.per_sample:g} for each: make it a tensor"
                )
            factor /= self.per_sample
        if self.scaler is not None:
            factor = factor * self.scaler.scale
        return total * factor

    @torch.no_grad()
    def step(self, step: int) -> None:
        """One update from the gradients that have come in; `step` counts from 0."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        factor = self._known_now(norm)
        norm = norm if factor is None else norm * factor
        bad = ~torch.isfinite(norm)
        if self.clip:
            clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        for group, lr in zip(self.optimizer.param_groups, self.full_lr, strict=True):
            group["lr"] = lr * self.schedule(step)
        self._apply(bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.norm, self.bad_steps = norm, self.bad_steps + bad
        self.bad_in_row = torch.where(bad, self.bad_in_row + 1, 0)
        if self.scaler is not None:
            self.scaler.update(bad)

    def forget(self) -> None:
        """Drop what has come in for a step that is not to be taken."""
        self.optimizer.zero_grad(set_to_none=True)
        self._weight = None

    def _known_now(self, like: Tensor) -> Tensor | None:
        """What the gradients still have to be multiplied by; None if they are right already."""
        factor = None
        if self._weight is not None:
            weight = self.world.sum(self._weight.to(like.dtype, copy=True))
            factor, self._weight = self.sizes.global_batch / weight, None
        if self.scaler is not None:
            unscale = 1 / self.scaler.scale
            factor = unscale if factor is None else factor * unscale
        return factor

    def _apply(self, bad: Tensor) -> None:
        if self._skips_itself:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bad.item():  # an optimizer that cannot skip by itself: the one that has to be asked
            self.optimizer.step()
