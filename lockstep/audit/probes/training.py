"""Forward, backward, optimizer steps: does what is trained stay one model?"""

import zlib
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...watch.models import replicated
from .. import events
from ..patch import Function
from . import wrappers
from .context import Context, WatchedOptimizer, has_state, index_of, never_raises, should_sample
from .tensors import readable, sample_hashes, tensors
from .wrappers import Wrappers

_ROWS = 8
"""Samples of a batch that are hashed when it goes into the model."""
_MOST_NAMES = 20
_MOST_AVERAGES = 4
_PART = 4096
"""Numbers of a tensor that are looked at."""
_HORIZONS = ("T_max", "total_steps", "total_iters")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def install(context: Context) -> None:
    probe = Training(context, wrappers.install(context))
    context.on_root.append(probe.watch_root)
    context.on_pass_end.append(probe.checksum_last_steps)
    context.intercept(torch.autograd, "backward", probe.backward)
    context.intercept(torch.autograd, "grad", probe.grad)
    context.watch(Optimizer, "__init__", after=probe.optimizer_created)
    for owner in (Optimizer, nn.Module):
        context.watch(owner, "zero_grad", context.writes(events.ZeroGrad), after=probe.check_cleared, hide=True)
    context.watch(ReduceLROnPlateau, "step", probe.plateau_step)
    context.watch(LRScheduler, "step", probe.scheduler_step)
    context.patches.later(register_optimizer_step_pre_hook(probe.before_step).remove)
    context.patches.later(register_optimizer_step_post_hook(probe.after_step).remove)


class Training:
    """State of the probes of one rank's training."""

    def __init__(self, context: Context, wrappers: Wrappers):
        self.context, self.recorder, self.wrappers = context, context.recorder, wrappers
        self.no_gradient_yet: set[str] = set()  # parameters of optimizers that stepped which never had a gradient
        self.not_optimized: set[str] = set()
        self.ran: set[int] = set()  # modules that ran forward while training, and their parameters
        self.modes: set[tuple[int, int]] = set()  # passes over data with such a forward pass without gradients
        self.carried = 0  # numbers that collectives carried before the step began, which may have some of its own
        self.unmoved: list[tuple[Tensor, Tensor, Tensor]] = []  # parts of weights, as they were, and of gradients
        self.schedulers: list[LRScheduler] = []
        self.roots: WeakSet[nn.Module] = WeakSet()
        self.dropouts: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # layers, as they were at first
        self.versions: list[tuple[str, Tensor, int]] = []
        self.stepping: list[Optimizer] = []  # one that steps another, which holds a part of its parameters
        self.in_backward = False  # also in one within another, and where torch's functions call themselves under a mode

    # -- forward ----------------------------------------------------------------------------------------------------
    def watch_root(self, module: nn.Module) -> None:
        if module not in self.roots:
            self.roots.add(module)
            self.context.before_forward(module, self.before_forward)

    @never_raises
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Of a module that is no part of another: record what goes into it, and whether it stays unchanged."""
        if self.context.hidden or self.wrappers.is_inside(module):
            return
        self._record_averaged()
        if module.training and not torch.is_grad_enabled():
            self._record_mode(module, self.context.reading)
        training = self.context.in_loop = torch.is_grad_enabled() and module.training
        if not training:
            return
        inputs = list(tensors((args, kwargs)))
        named = [(f"input {n} of the model", t) for n, t in enumerate(inputs)]
        named += [(f"tensor {n} of the batch", t) for n, t in enumerate(self.context.batch)]
        self.versions = [(name, t, t._version) for name, t in named if not t.is_inference()]
        if id(module) not in self.ran:
            self.ran |= {id(module), *(id(p) for p in module.parameters())}
        self.context.forwards += 1
        if should_sample(self.context.forwards):
            self._inputs(module, inputs)

    @never_raises
    def _record_mode(self, module: nn.Module, reading: tuple[int, int] | None) -> None:
        if reading is None or reading in self.modes:
            return
        self.modes.add(reading)
        layers = [n for n, m in module.named_modules() if m.training and (isinstance(m, _BatchNorm) or _drops(m))]
        self.recorder.write(events.TrainingMode(*reading, layers[:5]))

    @never_raises
    def _inputs(self, module: nn.Module, inputs: list[Tensor]) -> None:
        event = events.ModelInput(self.context.forwards)
        with self.recorder.hide():
            batch = next((t for t in inputs if readable(t) and t.dim() > 0), None)
            if batch is not None:
                event.rows = len(batch)
                event.hashes, _ = sample_hashes([batch[:_ROWS]])
            if module not in self.dropouts:
                self.dropouts[module] = [m for m in module.modules() if isinstance(m, _DROPOUT)]
            if any(map(_drops, self.dropouts[module])):
                event.generator = zlib.crc32(_generator_state(batch))
        self.recorder.write(event)

    @never_raises
    def _check_inputs(self) -> None:
        """Whether the inputs of the forward pass are unchanged when their gradients are computed."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                self.recorder.write(events.InputChanged(name, list(tensor.shape)))
        self.versions = []

    # -- backward ---------------------------------------------------------------------------------------------------
    def backward(self, original: Function, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_backward:
            return original(tensors, *args, **kwargs)
        self.context.roots()
        self._check_inputs()
        self.check_cleared()
        self.context.backwards += 1
        for act in self.context.on_backward:
            act()
        event = events.Backward(self._is_scaled(tensors) or False, self._divisors(tensors) or [])
        self.context.loss_is_scaled = False
        for watched in self.context.optimizers:  # before: one may step in the hooks of the backward pass
            watched.backwards += 1
        with self.recorder.call(event):
            return self._differentiate(original, tensors, *args, **kwargs)

    def _differentiate(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self.in_backward = True
        try:
            return original(*args, **kwargs)
        finally:
            self.in_backward = False

    @never_raises
    def _is_scaled(self, losses: Any) -> bool:
        """Whether the last operations on a loss include a product or quotient, other than the scaler's."""
        node, names = self._last_operation(losses), []
        for _ in range(3):
            if node is None:
                break
            names.append(type(node).__name__)
            node = next((n for n, _ in node.next_functions if n is not None), None)
        return any(name.startswith(("Div", "Mul")) for name in names)

    def _last_operation(self, losses: Any) -> Any:
        """The operation that gave the loss, other than the scaler's."""
        loss = losses if isinstance(losses, (Tensor, GradientEdge)) else next(iter(losses))
        node = loss.node if isinstance(loss, GradientEdge) else loss.grad_fn
        return node.next_functions[0][0] if self.context.loss_is_scaled and node is not None else node

    @never_raises
    def _divisors(self, losses: Any) -> list[float]:
        """The numbers that a loss was divided by in its last operations, without waiting for a device."""
        node, found = self._last_operation(losses), list[float]()
        while node is not None and type(node).__name__ in ("DivBackward0", "MulBackward0") and len(found) < 4:
            other = node._saved_other
            if not isinstance(other, Tensor) or other.numel() != 1 or other.is_cuda or not float(other):
                break
            found.append(float(other) if type(node).__name__ == "DivBackward0" else 1 / float(other))
            node = node.next_functions[0][0]
        return found

    def grad(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self.in_backward:
            return original(*args, **kwargs)
        for watched in self.context.optimizers:
            watched.backwards += 1
            watched.stale = False  # what is done with these gradients is not known
        return self._differentiate(original, *args, **kwargs)

    @never_raises
    def check_cleared(self, *_: Any, **__: Any) -> None:
        """Note for which optimizers the gradients of the last step were cleared."""
        for watched in self.context.optimizers:
            if watched.stale and should_sample(watched.steps):
                watched.stale = False  # also if the check fails
                with self.recorder.hide():
                    grads = [p.grad for p in watched.parameters if p.grad is not None]
                    whole = [local for g in grads[:8] if (local := replicated(g)) is not None]
                    watched.stale = any(bool((g != 0).any()) for g in whole)

    # -- optimizer --------------------------------------------------------------------------------------------------
    def optimizer_created(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        if type(optimizer).__module__.startswith("accelerate"):  # a wrapper around one that is known
            return
        number = len(self.context.optimizers)
        self.context.optimizers.append(WatchedOptimizer(optimizer, number))
        self.context.roots()
        self.recorder.write(events.OptimizerInit(number))

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.carried = self.carried if self.stepping else self.context.reduced
        self.stepping = [*self.stepping[: 0 if optimizer in self.stepping else None], optimizer]
        watched = self._watched(optimizer)
        if watched and watched.steps == 0:
            self._record_weights(watched)
        if watched and should_sample(watched.steps + 1) and type(optimizer).__module__.startswith("torch."):
            self._keep_bfloat16(watched)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched, context = self._watched(optimizer), self.context
        self.stepping = self.stepping[:-1]
        if watched is None:
            return
        watched.steps += 1
        step = events.Step(watched.number, watched.steps, watched.rates, watched.backwards)
        step.stale = watched.stale and should_sample(watched.steps - 1)
        step.unused_search_empty = self.wrappers.unused_search_empty()
        step.prints, step.waits = context.prints, list(context.waits)
        self._check_gradients(step, watched.parameters)
        step.unmoved = self._share_unmoved()
        step.clipped_before_sum = context.clipped and self._carries_all(watched, self.carried)
        context.clipped = False
        for act in context.on_step:
            act()
        context.prints = context.reduced = 0
        context.waits.clear()
        watched.backwards, watched.stale = 0, True
        self.recorder.write(step)
        if should_sample(watched.steps) or watched.steps == context.limit:
            self._record_weights(watched)
        context.steps = max(context.steps, watched.steps)
        if context.limit and context.steps >= context.limit and context.on_limit:
            context.on_limit()

    def _watched(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        """None if its step is not recorded: it is hidden, or only creates the state that a checkpoint is loaded into,
        which torch does by a step with learning rate 0."""
        watched = next((w for w in self.context.optimizers if w.optimizer is optimizer), None)
        if watched is None or self.recorder.is_hidden or self._is_part(watched):
            return None
        only_state = not watched.backwards and bool(rates := watched.rates) and not any(rates)
        return None if only_state else watched

    def _is_part(self, watched: WatchedOptimizer) -> bool:
        """Whether another optimizer that is in its step makes this one step for it, as ZeroRedundancyOptimizer does."""
        outer = next((w for w in self.context.optimizers if w.optimizer is self.stepping[0]), watched)
        return outer is not watched and {*map(id, watched.parameters)} <= {*map(id, outer.parameters)}

    @never_raises
    def _check_gradients(self, step: events.Step, mine: list[Tensor]) -> None:
        """Which parameters have no gradient yet, and which have one that no optimizer uses."""
        context = self.context
        if step.n == 1:
            known = {id(p) for _, p in context.parameters()}
            self.no_gradient_yet |= {context.name(p) for p in mine if p.requires_grad and id(p) in known}
            step.devices = sorted({str(p.device) for p in mine})
            step.keeps_state = has_state(context.optimizers[step.optimizer].optimizer)
            step.fp16_weights = any(p.dtype == torch.float16 for p in mine)
            step.without_gradients = bool(mine) and all(p.grad is None for p in mine)
            step.not_in_model = bool(self.ran) and not any(id(p) in self.ran for p in mine)
            if context.world > 1 and context.covered:
                outside = [p for p in mine if id(p) not in context.covered and replicated(p) is not None]
                step.not_wrapped = [context.name(p) for p in outside][:_MOST_NAMES]
        if self.no_gradient_yet or step.n == 1:
            with_gradient = [(name, p) for name, p in context.parameters() if p.grad is not None]
            self.no_gradient_yet -= {name for name, _ in with_gradient}
            step.no_gradient_yet = sorted(self.no_gradient_yet)[:_MOST_NAMES]
            optimized = {id(p) for watched in context.optimizers for p in watched.parameters}
            self.not_optimized |= {n for n, p in with_gradient if id(p) in self.ran and id(p) not in optimized}
            step.not_optimized = sorted(self.not_optimized)[:_MOST_NAMES]

    def checksum_last_steps(self) -> None:
        """At the end of an epoch: record the weights once more, in case the script ends before the next sample."""
        self._record_averaged()
        for watched in self.context.optimizers:
            if watched.steps and watched.recorded != watched.steps:
                self._record_weights(watched)

    @never_raises
    def _record_averaged(self) -> None:
        """Record the weights again where the script may have averaged them since the last step."""
        if not (carried := self.context.reduced):
            return
        self.context.reduced = 0
        for watched in self.context.optimizers:
            open_to_it = watched.steps and watched.averages < _MOST_AVERAGES and not watched.backwards
            if open_to_it and self._carries_all(watched, carried):
                watched.averages += 1
                self._record_weights(watched, averaged=True)

    def _carries_all(self, watched: WatchedOptimizer, numbers: int) -> bool:
        """Whether so many numbers may be all of an optimizer's weights, or their gradients."""
        return numbers > 0 and numbers >= 0.9 * sum(p.numel() for p in watched.parameters)

    @never_raises
    def _keep_bfloat16(self, watched: WatchedOptimizer) -> None:
        """Keep some weights that have no copy in higher precision, to see whether the step moves them."""
        chosen = [p for p in watched.parameters if p.dtype == torch.bfloat16 and p.grad is not None][:_MOST_NAMES]
        with self.recorder.hide():
            pairs = [(replicated(p.detach()), replicated(p.grad)) for p in chosen]  # type: ignore[arg-type]
            parts = [(p.flatten()[:_PART], g.flatten()[:_PART]) for p, g in pairs if p is not None and g is not None]
            self.unmoved = [(p, p.clone(), g != 0) for p, g in parts]

    @never_raises
    def _share_unmoved(self) -> float | None:
        kept, self.unmoved = self.unmoved, []
        with self.recorder.hide():
            moving = sum(int(mask.sum()) for _, _, mask in kept)
            still = sum(int((mask & (now == before)).sum()) for now, before, mask in kept)
        return still / moving if moving else None

    def _record_weights(self, watched: WatchedOptimizer, averaged: bool = False) -> None:
        watched.recorded = watched.steps
        checksums = self._checksums(watched.parameters) or {}
        self.recorder.write(events.Weights(watched.number, watched.steps, checksums, averaged))

    @never_raises
    def _checksums(self, parameters: list[Tensor]) -> dict[str, int]:
        self.context.roots()
        shards = {id(p) for module in self.context.shards for p in module.parameters()}
        named = {self.context.name(p, f"parameter {n}"): p for n, p in enumerate(parameters)}
        return self.context.checksums({name: p for name, p in named.items() if id(p) not in shards})

    def plateau_step(self, _: Any, metrics: Any, *__: Any, **___: Any) -> None:
        with self.recorder.hide():
            self.recorder.write(events.SchedulerStep(float(metrics)))

    def scheduler_step(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if getattr(scheduler, "last_epoch", -1) >= 0:  # not the one that its __init__ takes
            horizon = next((int(n) for name in _HORIZONS if (n := getattr(scheduler, name, None))), None)
            self.recorder.write(events.SchedulerStep(None, index_of(self.schedulers, scheduler), horizon))


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUT) and module.p > 0


def _generator_state(batch: Tensor | None) -> bytes:
    if batch is not None and batch.is_cuda:
        return torch.cuda.get_rng_state(batch.device).numpy().tobytes()
    return torch.get_rng_state().numpy().tobytes()
