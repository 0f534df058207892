"""Forward, backward, optimizer steps: does what is trained stay one model?"""

import zlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..patch import Function, Hook, Patches
from . import wrappers
from .context import Context, careful, replicated, worth_a_look
from .tensors import readable, sample_hashes, tensors
from .wrappers import Wrappers

_ROWS = 8
"""Samples of a batch by which it is known when it goes into the model."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def install(context: Context, patches: Patches) -> None:
    probe = Training(context, patches, wrappers.install(context, patches))
    context.on_root.append(probe.meet)
    context.on_pass_end.append(probe.look_back)
    patches.wrap(torch.autograd, "backward", probe.backward)
    patches.wrap(torch.autograd, "grad", probe.gradient)
    patches.wrap(Optimizer, "__init__", probe.optimizer)
    patches.wrap(Optimizer, "zero_grad", probe.zero_grad)
    patches.wrap(nn.Module, "zero_grad", probe.zero_grad)
    patches.later(register_optimizer_step_pre_hook(probe.before_step).remove)
    patches.later(register_optimizer_step_post_hook(probe.after_step).remove)
    patches.wrap(ReduceLROnPlateau, "step", probe.plateau)
    patches.wrap(LRScheduler, "step", probe.schedule)


class Training:
    """State of the probes of one rank's training."""

    def __init__(self, context: Context, patches: Patches, wrappers: Wrappers):
        self.context, self.recorder, self.patches, self.wrappers = context, context.recorder, patches, wrappers
        self.since: dict[int, int] = {}
        """Backward passes since each optimizer's last step."""
        self.kept: dict[int, bool] = {}
        """Whether the gradients of each optimizer's last step are still there."""
        self.counts: dict[int, int] = {}
        self.waiting: set[str] = set()
        """Parameters of optimizers that stepped which never had a gradient yet."""
        self.unowned: set[str] = set()
        self.ran: set[int] = set()
        """Modules that ran forward while training, and their parameters."""
        self.dropouts: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        """The modules in a module that drop at random, as it was when it was first looked at."""
        self.versions: list[tuple[str, Tensor, int]] = []
        self.looked: dict[int, int] = {}
        """The last step of an optimizer after which its weights were looked at."""
        self.in_backward = False
        """Also of a backward pass within another, and of torch's functions that call themselves under a mode."""

    # -- forward ----------------------------------------------------------------------------------------------------
    def meet(self, root: nn.Module) -> None:
        """A module that is no part of another: watch what goes into it and whether it comes out unchanged."""
        if isinstance(root, torch.jit.ScriptModule):  # it takes no hooks
            return
        self.patches.later(root.register_forward_pre_hook(Hook(self._before), with_kwargs=True).remove)

    @careful
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.context.hidden:
            return
        learning = torch.is_grad_enabled() and module.training
        self.context.in_loop = learning
        if not learning:
            return
        inputs = list(tensors((args, kwargs)))
        given = [(f"input {n} of the model", t) for n, t in enumerate(inputs)]
        given += [(f"tensor {n} of the batch", t) for n, t in enumerate(self.context.given)]
        self.versions = [(name, t, t._version) for name, t in given if not t.is_inference()]
        if id(module) not in self.ran:
            self.ran |= {id(module), *(id(p) for p in module.parameters())}
        self.context.forwards += 1
        self._inputs(module, inputs)

    @careful
    def _unchanged(self) -> None:
        """What went into the forward pass is what it was, before its gradients are computed."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                self.recorder.write("changed", what=name, shape=list(tensor.shape))
        self.versions = []

    @careful
    def _inputs(self, module: nn.Module, inputs: list[Tensor]) -> None:
        n = self.context.forwards
        if not worth_a_look(n):
            return
        with self.recorder.hide():
            batch = next((t for t in inputs if readable(t) and t.dim() > 0), None)
            seen: dict[str, Any] = {}
            if batch is not None:
                seen["rows"] = len(batch)
                seen["hashes"] = sample_hashes([batch[:_ROWS]])[0]
            if module not in self.dropouts:
                self.dropouts[module] = [m for m in module.modules() if isinstance(m, _DROPOUT)]
            if any(m.p > 0 for m in self.dropouts[module]):
                seen["generator"] = zlib.crc32(_generator_state(batch))
        self.recorder.write("input", n=n, **seen)

    # -- backward ---------------------------------------------------------------------------------------------------
    def backward(self, original: Function) -> Function:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.context.hidden or self.in_backward:
                return original(tensors, *args, **kwargs)
            self.context.roots()
            self._unchanged()
            self._cleared()
            number = self.context.backwards = self.context.backwards + 1
            scaled = self._is_scaled(tensors) or False
            self.context.scaler_at_work = False
            self.recorder.write("backward", phase="in", n=number, scaled=scaled)
            for key in self.since:  # before: an optimizer may step in the hooks of the backward pass
                self.since[key] += 1
            self.in_backward = True
            try:
                result = original(tensors, *args, **kwargs)
            except BaseException as error:
                self.recorder.write("backward", phase="failed", n=number, why=str(error)[:500])
                raise
            finally:
                self.in_backward = False
            self.recorder.write("backward", phase="out", n=number)
            return result

        return backward

    @careful
    def _is_scaled(self, losses: Any) -> bool:
        """Whether the last things done to a loss include a product or quotient, other than the scaler's."""
        loss = losses if isinstance(losses, (Tensor, GradientEdge)) else next(iter(losses))
        node, names = loss.node if isinstance(loss, GradientEdge) else loss.grad_fn, []
        if self.context.scaler_at_work and node is not None:
            node = node.next_functions[0][0]
        for _ in range(3):
            if node is None:
                break
            names.append(type(node).__name__)
            node = next((n for n, _ in node.next_functions if n is not None), None)
        return any(name.startswith(("Div", "Mul")) for name in names)

    def gradient(self, original: Function) -> Function:
        def grad(*args: Any, **kwargs: Any) -> Any:
            if self.context.hidden or self.in_backward:
                return original(*args, **kwargs)
            for key in self.since:
                self.since[key] += 1
                self.kept[key] = False  # what is done with these gradients is not known
            self.in_backward = True
            try:
                return original(*args, **kwargs)
            finally:
                self.in_backward = False

        return grad

    @careful
    def _cleared(self) -> None:
        """Note for which optimizers the gradients of the last step are gone."""
        for number, optimizer in enumerate(self.context.optimizers):
            if self.kept.get(number) and worth_a_look(self.counts[number]):
                self.kept[number] = False  # also if the look fails: what was not seen accuses nobody
                with self.recorder.hide():
                    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
                    whole = [local for g in grads[:8] if (local := replicated(g)) is not None]
                    self.kept[number] = any(bool((g != 0).any()) for g in whole)

    # -- optimizer --------------------------------------------------------------------------------------------------
    def optimizer(self, original: Function) -> Function:
        def __init__(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if type(optimizer).__module__.startswith("accelerate"):  # a wrapper around one that is known
                return
            number = len(self.context.optimizers)
            self.context.optimizers.append(optimizer)
            self.since[number] = 0
            self.context.roots()
            self.recorder.write("optimizer", n=number, lr=_rates(optimizer))

        return __init__

    def zero_grad(self, original: Function) -> Function:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.context.hidden:
                self.recorder.write("zero_grad")
            with self.recorder.hide():
                result = original(owner, *args, **kwargs)
            self._cleared()
            return result

        return zero_grad

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number(optimizer)
        if number is None or self.context.recorder.is_hidden or self._only_fills(optimizer, number):
            return
        if self.counts.get(number, 0) == 0:
            self.recorder.write("weights", optimizer=number, n=0, sums=self._sums(optimizer) or {})

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number(optimizer)
        if number is None or self.context.recorder.is_hidden or self._only_fills(optimizer, number):
            return
        n = self.counts[number] = self.counts.get(number, 0) + 1
        seen: dict[str, Any] = {"optimizer": number, "n": n, "lr": _rates(optimizer), "backwards": self.since[number]}
        seen["stale"] = self.kept.get(number, False) and worth_a_look(n - 1)
        seen |= self._gradients(optimizer, n) or {}
        if worth_a_look(n) or n == self.context.limit:
            seen["sums"] = self._sums(optimizer) or {}
            self.looked[number] = n
        context = self.context
        if (searched := self.wrappers.searched_in_vain()) is not None:
            seen["searched_in_vain"] = searched
        seen |= {"loading": round(context.loading, 6), "prints": context.prints, "waits": dict(context.waits)}
        context.loading, context.prints = 0.0, 0
        context.waits.clear()
        self.since[number], self.kept[number] = 0, True
        self.recorder.write("step", **seen)
        context.steps = max(context.steps, n)
        if context.limit and context.steps >= context.limit and context.on_limit:
            context.on_limit()

    @careful
    def _gradients(self, optimizer: Optimizer, n: int) -> dict[str, Any]:
        """Which parameters have no gradient yet, and which have one that no optimizer uses."""
        seen: dict[str, Any] = {}
        if n == 1:
            mine = [p for g in optimizer.param_groups for p in g["params"]]
            known = {id(p) for _, p in self.context.parameters()}
            self.waiting |= {self.context.name(p) for p in mine if p.requires_grad and id(p) in known}
            seen["devices"] = sorted({str(p.device) for p in mine})
            seen["half"] = any(p.dtype == torch.float16 for p in mine)
            if mine and all(p.grad is None for p in mine):
                seen["idle"] = True
                seen["foreign"] = bool(self.ran) and not any(id(p) in self.ran for p in mine)
            if self.context.world > 1:
                loose = [p for p in mine if id(p) not in self.context.covered and replicated(p) is not None]
                seen["loose"] = [self.context.name(p) for p in loose][:20] if self.context.covered else []
        if self.waiting or n == 1:
            with_gradient = {name for name, p in self.context.parameters() if p.grad is not None}
            self.waiting -= with_gradient
            seen["waiting"] = sorted(self.waiting)[:20]
            own = {id(p) for o in self.context.optimizers for g in o.param_groups for p in g["params"]}
            stray = [(name, p) for name, p in self.context.parameters() if id(p) in self.ran and id(p) not in own]
            unowned = {name for name, p in stray if p.grad is not None}
            self.unowned |= unowned
            seen["unowned"] = sorted(self.unowned)[:20]
        return seen

    def look_back(self) -> None:
        """At the end of an epoch: what went wrong since the last look, if the script ends before the next."""
        for number, n in self.counts.items():
            if self.looked.get(number) != n:
                self.looked[number] = n
                sums = self._sums(self.context.optimizers[number]) or {}
                self.recorder.write("look", optimizer=number, n=n, sums=sums)

    def _only_fills(self, optimizer: Optimizer, number: int) -> bool:
        """Whether a step only makes the state that a checkpoint is to be read into, as torch's own do: with rate 0."""
        return not self.since[number] and bool(rates := _rates(optimizer)) and not any(rates)

    def _number(self, optimizer: Optimizer) -> int | None:
        return next((n for n, o in enumerate(self.context.optimizers) if o is optimizer), None)

    @careful
    def _sums(self, optimizer: Optimizer) -> dict[str, int]:
        return self.context.sums(self._own(optimizer))

    def _own(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.context.roots()
        shards = {id(p) for module in self.context.shards for p in module.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = {self.context.name(p, f"parameter {n}"): p for n, p in enumerate(parameters)}
        return {name: p for name, p in named.items() if id(p) not in shards}

    def plateau(self, original: Function) -> Function:
        def step(schedule: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            self._judged(metrics)
            return original(schedule, metrics, *args, **kwargs)

        return step

    @careful
    def _judged(self, metrics: Any) -> None:
        with self.recorder.hide():
            self.recorder.write("plateau", value=float(metrics))

    def schedule(self, original: Function) -> Function:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_hidden and getattr(schedule, "last_epoch", -1) >= 0:
                self.recorder.write("schedule", name=type(schedule).__name__)
            return original(schedule, *args, **kwargs)

        return step


def _rates(optimizer: Optimizer) -> list[float]:
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [float(rate) for rate in rates if isinstance(rate, (int, float, Tensor))]  # some keep None there


def _generator_state(batch: Tensor | None) -> bytes:
    if batch is not None and batch.is_cuda:
        return torch.cuda.get_rng_state(batch.device).numpy().tobytes()
    return torch.get_rng_state().numpy().tobytes()
