"""What changes the weights: optimizer, learning rate, the step from summed gradients, and averages of the weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .batching import Batching
from .config import Optim
from .precision import Scaler
from .sharding import Sharding

_NUMBER = ":number"
"""Marks optimizer state that was a Python number, so that it is restored as one."""


def build(optim: Optim, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the flags describe. Fused ones skip a step with a non-finite gradient on the device."""
    parameters = list(parameters)
    if optim.optimizer == "sgd":
        sgd = torch.optim.SGD(parameters, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=True)
        if optim.momentum:  # torch leaves the buffer unset until a step is taken, and a skipped first step takes none
            for parameter in parameters:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(parameters, optim.lr, betas, weight_decay=optim.weight_decay, fused=True)


def check_optimizer(returned: Any) -> torch.optim.Optimizer | None:
    """Return what a recipe's optimizer() returned; a ValueError that shows the right form if it is no optimizer."""
    if returned is None or isinstance(returned, torch.optim.Optimizer):
        return returned
    raise ValueError(
        f"optimizer() returned a {type(returned).__name__}, not one torch.optim.Optimizer (or None for that of the "
        "flags). Settings that differ between parameters are groups of one optimizer: return torch.optim.AdamW("
        '[{"params": backbone, "lr": 1e-5}, {"params": head, "lr": 1e-3}])'
    )


def scaled_lr(optim: Optim, global_batch: int) -> float:
    """Return the learning rate for this global batch: it follows the batch, never the number of GPUs."""
    ratio = global_batch / optim.base_batch_size
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.lr_scaling]


class Schedule:
    """The learning rate of a step, as a factor of the full one. It follows from the step, and from `drops` alone."""

    def __init__(self, optim: Optim, batching: Batching, own: Callable[[int], float] | None = None):
        """`own`: the factor by step, of a recipe with a schedule of its own."""
        self.kind, self.own = "the recipe's own" if own else optim.schedule, own
        in_epochs = round(optim.warmup_epochs * batching.steps_per_epoch) if optim.warmup_epochs else 0
        self.warmup = optim.warmup_steps + in_epochs
        self.length = max(1, batching.n_steps - self.warmup)
        self.floor = optim.min_lr / optim.lr if optim.lr else 0.0
        self.decay_steps, self.decay_factor, self.decay_patience = (
            optim.decay_steps, optim.decay_factor, optim.decay_patience,
        )  # fmt: skip
        self.drops = 0
        """Of the schedule plateau: how often evaluations without improvement have lowered the rate."""

    def __call__(self, step: int) -> float:
        """Return the factor for `step`, which counts from 0."""
        if self.own is not None:
            return self.own(step)
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
        """Lower the rate of the schedule plateau after `decay_patience` evaluations in a row without improvement."""
        if self.kind == "plateau" and bad_evaluations and bad_evaluations % self.decay_patience == 0:
            self.drops += 1

    def state_dict(self) -> dict[str, Any]:
        return {"drops": self.drops}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drops = state["drops"]


class Update:
    """One optimizer step from summed gradients, without waiting for the device.

    Gradients have been added up over micro-batches and ranks; `step` multiplies them once by all that is known only
    then: the weight of the global batch, the fp16 scale, the clipping. A gradient that is not finite, on all ranks
    alike, leaves everything as it was.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedule: Schedule,
        lr_ratio: float,
        clip: float,
        scaler: Scaler | None,
        device: torch.device,
    ):
        """`optimizers`: by name; the only one has the name ""."""
        self.optimizers, self.schedule, self.clip, self.scaler = optimizers, schedule, clip, scaler
        self._full_lrs = {
            name: [group["lr"] * lr_ratio for group in optimizer.param_groups] for name, optimizer in optimizers.items()
        }
        self.norms = {name: torch.zeros((), device=device) for name in optimizers}
        """The norm of each optimizer's last gradient."""
        self.lr = 0.0
        """Of the last step, in its first group."""
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_bad_in_row = torch.zeros((), dtype=torch.int64, device=device)
        """Since the last log."""
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        """The first step with a non-finite gradient since the last log, counted from 0; -1 for none."""
        self.own_optimizer = False
        """Whether the recipe has built the optimizer itself."""
        self.sharding: Sharding | None = None
        """With --shard: how parameters, gradients or state are spread over the ranks."""
        self.use(next(iter(optimizers)))

    def use(self, name: str) -> None:
        """Let the next steps be those of one of the optimizers."""
        self.name, self.optimizer, self.full_lr = name, self.optimizers[name], self._full_lrs[name]
        self.parameters = self.parameters_of(name)
        self._skips_itself = getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        return [p for group in self.optimizers[name].param_groups for p in group["params"]]

    def values(self) -> dict[str, float]:
        """Return learning rate and norm of the gradient for the log, of several optimizers each under its name."""
        found = dict[str, float]()
        for name, optimizer in self.optimizers.items():
            start = f"{name}_" if name else ""
            found |= {f"{start}lr": optimizer.param_groups[0]["lr"], f"{start}grad_norm": float(self.norms[name])}
        return found

    def kinds(self) -> str:
        """Return the types of the optimizers in words."""
        named = ((name, type(optimizer).__name__) for name, optimizer in self.optimizers.items())
        return ", ".join(f"{name}: {kind}" if name else kind for name, kind in named)

    def learning_rates(self) -> str:
        """Return the full learning rates in words, each of the first group of an optimizer."""
        return ", ".join(f"{name}: {lr[0]:g}" if name else f"{lr[0]:g}" for name, lr in self._full_lrs.items())

    @torch.no_grad()
    def step(self, step: int, factor: Tensor | None = None, discard: Tensor | None = None) -> Tensor:
        """Update the weights, and return whether they are left as they were.

        `step` counts from 0, gradients are multiplied by `factor`. With `discard` the step does not count at all: it
        will be done again.
        """
        if self.sharding is None:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        else:
            grads = self.sharding.gradients(self.parameters)
            norm = self.sharding.total_norm(grads)
        if self.scaler is not None:
            unscale = 1 / self.scaler.scale
            factor = unscale if factor is None else factor * unscale
        norm = norm if factor is None else norm * factor
        bad = ~torch.isfinite(norm)
        skip, bad = (bad, bad) if discard is None else (bad | discard, bad & ~discard)
        if self.clip:
            clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        for group, lr in zip(self.optimizer.param_groups, self.full_lr, strict=True):
            group["lr"] = lr * self.schedule(step)
        self.lr = self.optimizer.param_groups[0]["lr"]
        if self._skips_itself:
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skip.item():  # an optimizer without that: the host has to wait for the device
            self.optimizer.step()
        for parameter in self.parameters:  # the optimizer may not have all of them
            parameter.grad = None
        if self.sharding is not None:
            self.sharding.publish()
        self.norms[self.name], self.bad_steps = norm, self.bad_steps + bad
        in_row = torch.where(bad, self.bad_in_row + 1, 0)
        self.bad_in_row = in_row if discard is None else torch.where(discard, self.bad_in_row, in_row)
        self.most_bad_in_row = torch.maximum(self.most_bad_in_row, self.bad_in_row)
        self.first_bad = torch.where(bad & (self.first_bad < 0), step, self.first_bad)
        if self.scaler is not None:
            self.scaler.update(bad, discard)
        return skip

    def shard(self, sharding: Sharding) -> None:
        """Update, from now on, only this rank's part of the parameters; `parameters` stays all of them."""
        self.sharding = sharding
        sharding.restrict(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"bad_steps": int(self.bad_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bad_steps.fill_(state["bad_steps"])


class OptimizerState:
    """The state of an optimizer as "<parameter name>/<state name>": free of parameter order, groups and wrappers."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]):
        self.optimizer, self.parameters = optimizer, parameters

    def state_dict(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        tensors = {}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                assert parameter in names, "the optimizer holds a parameter that the model does not have"
                name = f"{names[parameter]}/{key}"
                if isinstance(value, Tensor):
                    tensors[name] = value
                elif isinstance(value, bool | int | float):
                    tensors[name + _NUMBER] = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
                elif value is not None:  # None stands for what the optimizer makes at its next step
                    kind = f"{type(self.optimizer).__name__} keeps {name} as a {type(value).__name__}"
                    raise ValueError(f"{kind}; a checkpoint holds tensors and numbers only, so use another optimizer")
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, whatever order and groups the parameters have now."""
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        states: dict[Tensor, dict[str, Any]] = {}
        for name, value in tensors.items():
            owner, _, key = name.rpartition("/")
            parameter = self.parameters.get(owner)
            if parameter is None or parameter not in groups:
                raise ValueError(
                    f"the checkpoint has optimizer state {name}, but no parameter {owner!r} is trained here"
                )
            restored = value.item() if key.endswith(_NUMBER) else _like(value, key, parameter, groups[parameter])
            states.setdefault(parameter, {})[key.removesuffix(_NUMBER)] = restored
        self.optimizer.state.clear()
        self.optimizer.state.update(states)


def _like(value: Tensor, key: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a copy on the device where the optimizer itself would have made it, in the type it was saved in."""
    if key == "step":  # the counter stays on the host unless kernels read it
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32, copy=True) if on_device else value.to("cpu", copy=True)
    if value.shape == parameter.shape:  # the strides too: fused kernels want those of the parameter
        return torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


class Ema:
    """An average of the weights with decay min(decay, (1 + n) / (10 + n)) at update n, so that it starts fast."""

    def __init__(self, model: nn.Module, decay: float, sharding: Sharding | None = None):
        """`sharding`: average only this rank's part of the weights."""
        self.decay, self._sharding = decay, sharding
        self.shadow: dict[str, Tensor] = {}
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: tied weights are averaged and swapped once
        tensors = model.state_dict() if sharding is None else sharding.live(model)
        for name, live in tensors.items():  # the model's own tensors, not copies
            pair = self._pairs.setdefault(live.data_ptr() or id(live), (live.clone(), live))
            self.shadow[name] = pair[0]
        pairs = self._pairs.values()
        self._floats = [pair[0] for pair in pairs if pair[0].is_floating_point()]
        self._live_floats = [pair[1] for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Move towards the model's weights; `n` counts updates from 0."""
        torch._foreach_lerp_(self._floats, self._live_floats, 1 - min(self.decay, (1 + n) / (10 + n)))
        for shadow, live in self._counters:
            shadow.copy_(live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averaged weights into the model for the duration of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.shadow.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        for shadow, live in self._pairs.values():
            kept = live.clone()
            live.copy_(shadow)
            shadow.copy_(kept)
        if self._sharding is not None:
            self._sharding.publish()
