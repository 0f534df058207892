"""DDP and FSDP: what they wrap, whether the forward pass goes through them, what they are told to leave out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ...parallel import SyncBatchNorm
from ..patch import Function, Hook, Patches
from ..trace import site
from .context import Context, careful, worth_a_look


def install(context: Context, patches: Patches) -> "Wrappers":
    probe = Wrappers(context, patches)
    patches.wrap(DistributedDataParallel, "__init__", probe.wrapping)
    patches.wrap(DistributedDataParallel, "forward", probe.wrapped_forward)
    patches.wrap(DistributedDataParallel, "no_sync", probe.no_sync)
    patches.when_imported("torch.distributed.fsdp", probe.meet_fsdp)
    patches.when_imported("torch.distributed.tensor.parallel", probe.meet_tensor_parallel)
    joining = "torch.distributed.algorithms.join"
    patches.when_imported(joining, lambda join: patches.wrap(join.Join, "__enter__", probe.joining))
    return probe


class Wrappers:
    """State of the probes of what one rank's models are wrapped in."""

    def __init__(self, context: Context, patches: Patches):
        self.context, self.recorder, self.patches = context, context.recorder, patches
        self.inside: list[nn.Module] = []
        """Modules whose wrapper's forward is running."""
        self.forwards: dict[int, int] = {}
        self.around = 0
        self.sharded = 0
        """How many modules of FSDP's second version are in their forward pass, one within the other."""
        self.used: dict[int, set[int]] = {}
        """Of wrappers that search for unused parameters: those whose gradient was computed here in this step."""

    def wrapping(self, original: Function) -> Function:
        def __init__(wrapper: DistributedDataParallel, /, module: nn.Module, *args: Any, **kwargs: Any) -> None:
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
            self._watch_entry(module, number)
            if wrapper.find_unused_parameters:
                self._watch_use(module, number)

        return __init__

    @careful
    def _watch_entry(self, module: nn.Module, number: int) -> None:
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            hook = module.register_forward_pre_hook(Hook(lambda m, _: self._entered(m, number)))
            self.patches.later(hook.remove)

    @careful
    def _watch_use(self, module: nn.Module, number: int) -> None:
        used = self.used[number] = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                key = id(parameter)
                self.patches.later(parameter.register_hook(lambda _, key=key: used.add(key)).remove)

    def meet_fsdp(self, fsdp: Any) -> None:
        self.patches.wrap(fsdp, "fully_shard", self.sharding)
        self.patches.wrap(fsdp.FullyShardedDataParallel, "__init__", self.flattening)

    def meet_tensor_parallel(self, parallel: Any) -> None:
        self.patches.wrap(parallel, "parallelize_module", self.splitting)

    def splitting(self, original: Function) -> Function:
        def parallelize_module(module: nn.Module, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.hide():
                result = original(module, device_mesh, *args, **kwargs)
            ranks = device_mesh.mesh.flatten().tolist() if device_mesh is not None else range(self.context.world)
            self.recorder.write("tensor_parallel", ranks=sorted(ranks))
            return result

        return parallelize_module

    def flattening(self, original: Function) -> Function:
        def __init__(wrapper: nn.Module, /, *args: Any, **kwargs: Any) -> None:
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
                self.patches.later(part.register_forward_pre_hook(Hook(self._into_shards), prepend=True).remove)
                self.patches.later(part.register_forward_hook(Hook(self._out_of_shards), always_call=True).remove)
            self.recorder.write("fsdp")
            return result

        return fully_shard

    def _into_shards(self, module: nn.Module, _: Any) -> None:
        self.sharded += 1
        if self.sharded == 1:
            self._passing(module, "in")

    def _out_of_shards(self, module: nn.Module, *_: Any) -> None:
        self.sharded = max(0, self.sharded - 1)
        if self.sharded == 0:
            self._passing(module, "out")

    def _passing(self, module: nn.Module, phase: str) -> None:
        if not self.context.hidden:
            learning = torch.is_grad_enabled() and module.training
            self.recorder.write("forward", ddp=None, phase=phase, learning=learning, syncs=None)

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

    @careful
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

    def searched_in_vain(self) -> bool | None:
        """Whether all wrappers that search for unused parameters found none in this step; None: none searches."""
        vain = None
        for wrapper, used in self.used.items():
            searched = {id(p) for p in self.context.wrappers[wrapper].parameters() if p.requires_grad}
            vain = vain is not False and searched <= used
            used.clear()
        return vain


def _local_norms(module: nn.Module) -> list[str]:
    shared = (SyncBatchNorm, nn.SyncBatchNorm)
    norms = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, shared)]
    return [name for name, m in norms if m.training or not m.track_running_stats][:20]
