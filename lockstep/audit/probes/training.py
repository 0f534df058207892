"""Wrappers, forward, backward, optimizer steps: does what is trained stay one model?"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...parallel import SyncBatchNorm
from ..trace import site
from .context import Context, replicated, worth_a_look
from .patch import Function, Patches
from .tensors import row_hashes, tensors

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def install(context: Context, patches: Patches) -> None:
    probe = Training(context, patches)
    context.on_root.append(probe.meet)
    patches.wrap(DistributedDataParallel, "__init__", probe.wrapping)
    patches.wrap(DistributedDataParallel, "forward", probe.wrapped_forward)
    patches.wrap(DistributedDataParallel, "no_sync", probe.no_sync)
    patches.wrap(torch.autograd, "backward", probe.backward)
    patches.wrap(torch.autograd, "grad", probe.gradient)
    patches.wrap(Optimizer, "__init__", probe.optimizer)
    patches.wrap(Optimizer, "zero_grad", probe.zero_grad)
    patches.wrap(nn.Module, "zero_grad", probe.zero_grad)
    patches.later(register_optimizer_step_pre_hook(probe.before_step).remove)
    patches.later(register_optimizer_step_post_hook(probe.after_step).remove)
    patches.wrap(ReduceLROnPlateau, "step", probe.plateau)
    patches.wrap(LRScheduler, "step", probe.schedule)
    patches.when_imported("torch.distributed.fsdp", probe.meet_fsdp)
    joining = "torch.distributed.algorithms.join"
    patches.when_imported(joining, lambda join: patches.wrap(join.Join, "__enter__", probe.joining))


class Hook:
    """A hook that stays with its module: a copy of the module, or one that was saved and loaded, has an idle one."""

    def __init__(self, act: Function):
        self.act = act

    def __call__(self, *args: Any) -> Any:
        return self.act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class Training:
    """State of the probes of one rank's training."""

    def __init__(self, context: Context, patches: Patches):
        self.context, self.recorder, self.patches = context, context.recorder, patches
        self.inside: list[nn.Module] = []
        """Modules whose wrapper's forward is running."""
        self.forwards: dict[int, int] = {}
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
        self.around = 0
        self.versions: list[tuple[str, Tensor, int]] = []
        self.used: dict[int, set[int]] = {}
        """Of wrappers that search for unused parameters: those whose gradient was computed here in this step."""

    # -- wrappers ---------------------------------------------------------------------------------------------------
    def wrapping(self, original: Function) -> Function:
        def __init__(wrapper: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            with self.recorder.hide():
                original(wrapper, module, *args, **kwargs)
            number = len(self.context.wrappers)
            self.context.wrappers.append(wrapper)
            self.context.covered |= {id(p) for p in module.parameters()}
            self.recorder.write(
                "ddp",
                n=number,
                find_unused=wrapper.find_unused_parameters,
                sends_buffers=wrapper.broadcast_buffers,
                device_ids=kwargs.get("device_ids", args[0] if args else None),
            )
            hook = module.register_forward_pre_hook(Hook(lambda m, _: self._entered(m, number)))
            self.patches.later(hook.remove)
            if wrapper.find_unused_parameters:
                self._watch_use(module, number)

        return __init__

    def _watch_use(self, module: nn.Module, number: int) -> None:
        used = self.used[number] = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                key = id(parameter)
                self.patches.later(parameter.register_hook(lambda _, key=key: used.add(key)).remove)

    def meet_fsdp(self, fsdp: Any) -> None:
        self.patches.wrap(fsdp, "fully_shard", self.sharding)
        self.patches.wrap(fsdp.FullyShardedDataParallel, "__init__", self.flattening)

    def flattening(self, original: Function) -> Function:
        def __init__(wrapper: nn.Module, *args: Any, **kwargs: Any) -> None:
            with self.recorder.hide():
                original(wrapper, *args, **kwargs)
            self.context.shards.append(wrapper)
            self.context.covered |= {id(p) for p in wrapper.parameters()}
            self.recorder.write("fsdp")

        return __init__

    def sharding(self, original: Function) -> Function:
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.hide():
                result = original(module, *args, **kwargs)
            for part in module if isinstance(module, (list, tuple)) else [module]:
                self.context.covered |= {id(p) for p in part.parameters()}
            self.recorder.write("fsdp")
            return result

        return fully_shard

    def joining(self, original: Function) -> Function:
        def __enter__(join: Any) -> Any:
            self.recorder.write("join")
            return original(join)

        return __enter__

    def wrapped_forward(self, original: Function) -> Function:
        def forward(wrapper: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if self.context.hidden:
                return original(wrapper, *inputs, **kwargs)
            number = next((n for n, w in enumerate(self.context.wrappers) if w is wrapper), -1)
            learning = torch.is_grad_enabled() and wrapper.module.training
            syncs = wrapper.require_backward_grad_sync
            self.recorder.write("forward", ddp=number, phase="in", learning=learning, syncs=syncs)
            self.inside.append(wrapper.module)
            try:
                return original(wrapper, *inputs, **kwargs)
            finally:
                self.inside.pop()
                self.recorder.write("forward", ddp=number, phase="out", learning=learning, syncs=syncs)

        return forward

    def _entered(self, module: nn.Module, number: int) -> None:
        if self.context.hidden or not (torch.is_grad_enabled() and module.training):
            return
        if not any(m is module for m in self.inside) and self.around < 20:
            self.around += 1
            self.recorder.write("around", ddp=number)
        n = self.forwards[number] = self.forwards.get(number, 0) + 1
        wrapper = self.context.wrappers[number]
        sends = not wrapper.broadcast_buffers or wrapper.require_forward_param_sync
        if worth_a_look(n) and sends:
            buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point() and b.numel()}
            norms = _local_norms(module)
            self.recorder.write("buffers", ddp=number, n=n, sums=self.context.sums(buffers), local_norms=norms)

    def no_sync(self, original: Function) -> Function:
        @contextmanager
        def no_sync(wrapper: DistributedDataParallel) -> Iterator[None]:
            before = self.context.backwards
            number = next((n for n, w in enumerate(self.context.wrappers) if w is wrapper), -1)
            forwards = self.forwards.get(number, 0)
            at = site(4)
            with original(wrapper):
                yield
            backwards, inside = self.context.backwards - before, self.forwards.get(number, 0) - forwards
            self.recorder.write("no_sync", at, backwards=backwards, forwards=inside)

        return no_sync

    # -- forward ----------------------------------------------------------------------------------------------------
    def meet(self, root: nn.Module) -> None:
        """A module that is no part of another: watch what goes into it and whether it comes out unchanged."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.context.hidden:
                return
            learning = torch.is_grad_enabled() and module.training
            inputs = list(tensors((args, kwargs)))
            self.context.in_loop = learning
            if learning:
                given = [(f"input {n} of the model", t) for n, t in enumerate(inputs)]
                given += [(f"tensor {n} of the batch", t) for n, t in enumerate(self.context.given)]
                self.versions = [(name, t, t._version) for name, t in given if not t.is_inference()]
                if id(module) not in self.ran:
                    self.ran |= {id(module), *(id(p) for p in module.parameters())}
                self.context.forwards += 1
                self._inputs(module, inputs)

        self.patches.later(root.register_forward_pre_hook(Hook(before), with_kwargs=True).remove)

    def _unchanged(self) -> None:
        """What went into the forward pass is what it was, before its gradients are computed."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                self.recorder.write("changed", what=name, shape=list(tensor.shape))
        self.versions = []

    def _inputs(self, module: nn.Module, inputs: list[Tensor]) -> None:
        n = self.context.forwards
        if not worth_a_look(n):
            return
        with self.recorder.hide():
            batch = next((t for t in inputs if not t.is_nested and t.dim() > 0), None)
            seen: dict[str, Any] = {}
            if batch is not None:
                seen["rows"] = len(batch)
                seen["hashes"] = row_hashes([batch])[:256]
            if any(isinstance(m, _DROPOUT) and m.p > 0 for m in module.modules()):
                seen["generator"] = zlib.crc32(_generator_state(batch))
        self.recorder.write("input", n=n, **seen)

    # -- backward ---------------------------------------------------------------------------------------------------
    def backward(self, original: Function) -> Function:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.context.hidden:
                return original(tensors, *args, **kwargs)
            self.context.roots()
            self._unchanged()
            self._cleared()
            number = self.context.backwards = self.context.backwards + 1
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            scaled = _is_scaled(loss, self.context.scaler_at_work)
            self.context.scaler_at_work = False
            self.recorder.write("backward", phase="in", n=number, scaled=scaled)
            for key in self.since:  # before: an optimizer may step in the hooks of the backward pass
                self.since[key] += 1
            try:
                result = original(tensors, *args, **kwargs)
            except BaseException as error:
                self.recorder.write("backward", phase="failed", n=number, why=str(error)[:500])
                raise
            self.recorder.write("backward", phase="out", n=number)
            return result

        return backward

    def gradient(self, original: Function) -> Function:
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not self.context.hidden:
                for key in self.since:
                    self.since[key] += 1
            return original(*args, **kwargs)

        return grad

    def _cleared(self) -> None:
        """Note for which optimizers the gradients of the last step are gone."""
        for number, optimizer in enumerate(self.context.optimizers):
            if self.kept.get(number) and worth_a_look(self.counts[number]):
                with self.recorder.hide():
                    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
                    whole = [local for g in grads[:8] if (local := replicated(g)) is not None]
                    self.kept[number] = any(bool((g != 0).any()) for g in whole)

    # -- optimizer --------------------------------------------------------------------------------------------------
    def optimizer(self, original: Function) -> Function:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
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
        if number is None or self.context.recorder.is_hidden:
            return
        if self.counts.get(number, 0) == 0:
            self.recorder.write("weights", optimizer=number, n=0, sums=self.context.sums(self._own(optimizer)))

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number(optimizer)
        if number is None or self.context.recorder.is_hidden:
            return
        n = self.counts[number] = self.counts.get(number, 0) + 1
        seen: dict[str, Any] = {"optimizer": number, "n": n, "lr": _rates(optimizer), "backwards": self.since[number]}
        seen["stale"] = self.kept.get(number, False) and worth_a_look(n - 1)
        seen |= self._gradients(optimizer, n)
        if worth_a_look(n):
            seen["sums"] = self.context.sums(self._own(optimizer))
        context = self.context
        for wrapper, used in self.used.items():
            searched = {id(p) for p in context.wrappers[wrapper].parameters() if p.requires_grad}
            seen["searched_in_vain"] = searched <= used
            used.clear()
        seen |= {"loading": round(context.loading, 6), "prints": context.prints, "waits": dict(context.waits)}
        context.loading, context.prints = 0.0, 0
        context.waits.clear()
        self.since[number], self.kept[number] = 0, True
        self.recorder.write("step", **seen)
        context.steps = max(context.steps, n)
        if context.limit and context.steps >= context.limit and context.on_limit:
            context.on_limit()

    def _gradients(self, optimizer: Optimizer, n: int) -> dict[str, Any]:
        """Which parameters have no gradient yet, and which have one that no optimizer uses."""
        seen: dict[str, Any] = {}
        own = {id(p) for o in self.context.optimizers for g in o.param_groups for p in g["params"]}
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
            stray = [(name, p) for name, p in self.context.parameters() if id(p) in self.ran and id(p) not in own]
            unowned = {name for name, p in stray if p.grad is not None}
            self.unowned |= unowned
            seen["unowned"] = sorted(self.unowned)[:20]
        return seen

    def _number(self, optimizer: Optimizer) -> int | None:
        return next((n for n, o in enumerate(self.context.optimizers) if o is optimizer), None)

    def _own(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.context.roots()
        shards = {id(p) for module in self.context.shards for p in module.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = {self.context.name(p, f"parameter {n}"): p for n, p in enumerate(parameters)}
        return {name: p for name, p in named.items() if id(p) not in shards}

    def plateau(self, original: Function) -> Function:
        def step(schedule: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.hide():
                self.recorder.write("plateau", value=float(metrics))
            return original(schedule, metrics, *args, **kwargs)

        return step

    def schedule(self, original: Function) -> Function:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_hidden and getattr(schedule, "last_epoch", -1) >= 0:
                self.recorder.write("schedule", name=type(schedule).__name__)
            return original(schedule, *args, **kwargs)

        return step


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _is_scaled(loss: Tensor, by_scaler: bool) -> bool:
    """Whether the last things done to a loss include a product or quotient, other than the scaler's."""
    node, names = loss.grad_fn, []
    if by_scaler and node is not None:
        node = node.next_functions[0][0]
    for _ in range(3):
        if node is None:
            break
        names.append(type(node).__name__)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return any(name.startswith(("Div", "Mul")) for name in names)


def _local_norms(module: nn.Module) -> list[str]:
    shared = (SyncBatchNorm, nn.SyncBatchNorm)
    norms = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, shared)]
    return [name for name, m in norms if m.training or not m.track_running_stats][:20]


def _generator_state(batch: Tensor | None) -> bytes:
    if batch is not None and batch.is_cuda:
        return torch.cuda.get_rng_state(batch.device).numpy().tobytes()
    return torch.get_rng_state().numpy().tobytes()
