"""DDP and FSDP: what they wrap, whether the forward pass goes through them, what they skip."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ...batchnorm import SyncBatchNorm
from .. import events
from ..patch import Function, Hook
from ..source import user_line
from .context import Context, never_raises, should_sample

_MOST_BYPASSES = 20
_DEVICES = (str, int, torch.device)
_AVERAGING = "torch.distributed.algorithms.model_averaging"
_AVERAGERS = (
    f"{_AVERAGING}.averagers:PeriodicModelAverager",
    f"{_AVERAGING}.hierarchical_model_averager:HierarchicalModelAverager",
    "accelerate.local_sgd:LocalSGD",
)


def install(context: Context) -> "Wrappers":
    probe = Wrappers(context)
    context.watch(DistributedDataParallel, "__init__", after=probe.ddp_created, hide=True)
    context.intercept(DistributedDataParallel, "forward", probe.ddp_forward)
    context.intercept(DistributedDataParallel, "no_sync", probe.no_sync)
    fsdp, parallel = "torch.distributed.fsdp", "torch.distributed.tensor.parallel"
    context.watch(fsdp, "fully_shard", after=probe.sharded, hide=True)
    context.watch(f"{fsdp}:FullyShardedDataParallel", "__init__", after=probe.fsdp_created, hide=True)
    context.watch(parallel, "parallelize_module", after=probe.parallelized, hide=True)
    for name in ("to", "cuda", "cpu"):
        context.watch(nn.Module, name, partial(probe.moving, name))
    for averager in _AVERAGERS:
        context.watch(averager, "__init__", after=probe.averages)
    context.watch("torch.distributed.algorithms.join:Join", "__enter__", context.writes(events.Join))
    return probe


class Wrappers:
    """State of the probes of what one rank's models are wrapped in."""

    def __init__(self, context: Context):
        self.context, self.recorder, self.patches = context, context.recorder, context.patches
        self.inside: list[nn.Module] = []  # modules whose wrapper's forward is running
        self.forwards: dict[int, int] = {}
        self.bypasses = 0
        self.shard_depth = 0  # modules of FSDP's second version in their forward pass, one within the other
        self.places: dict[int, str] = {}  # the type of the device that a parameter was moved to last, by id
        self.used: dict[int, set[int]] = {}  # parameters with a gradient, for wrappers that search for unused ones

    # -- DDP ---------------------------------------------------------------------------------------------------------
    def ddp_created(self, _: None, wrapper: DistributedDataParallel, module: nn.Module, *__: Any, **___: Any) -> None:
        number = len(self.context.wrappers)
        self.context.wrappers.append(wrapper)
        self.context.covered |= {id(p) for p in module.parameters()}
        self.recorder.write(events.DDPInit(number))
        for act in self.context.on_root:  # for a forward pass around the wrapper
            act(module)
        self.context.before_forward(module, lambda m, *_: self._entered(m, number))
        for parameter in () if self.recorder.on_gpu else module.parameters():
            self.places.setdefault(id(parameter), "cpu")
        if wrapper.find_unused_parameters:
            self._watch_gradients(module, number)

    def is_inside(self, module: nn.Module) -> bool:
        """Whether the wrapper of a module is running it now."""
        return any(m is module for m in self.inside)

    def moving(self, method: str, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record that the model inside DDP goes to another device. Where CUDA is mapped onto the CPU nothing moves:
        what counts is what the script asked for."""
        words = (*args[:1], kwargs.get("device")) if method == "to" else (method,)
        asked = ["cuda" if type(w) is int else str(w).split(":")[0] for w in words if isinstance(w, _DEVICES)]
        parameters = list(module.parameters()) if asked else []
        for parameter in parameters[:1]:
            before = "cuda" if parameter.is_cuda else self.places.get(id(parameter))
            if before not in (None, asked[0]) and id(parameter) in self.context.covered and self.context.wrappers:
                self.recorder.write(events.MovedAfterWrapping(str(before), asked[0]))
        self.places |= {id(parameter): asked[0] for parameter in parameters}

    def averages(self, _: None, library: Any, *__: Any, **___: Any) -> None:
        """Record the period of a library that averages weights now and then."""
        groups = getattr(library, "period_process_group_dict", None)  # of HierarchicalModelAverager
        period = max(groups) if groups else getattr(library, "period", getattr(library, "local_sgd_steps", 0))
        if period > 1 and getattr(library, "enabled", True):
            self.recorder.write(events.SeldomAveraged(period))

    @never_raises
    def _watch_gradients(self, module: nn.Module, number: int) -> None:
        used = self.used[number] = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                key = id(parameter)
                self.patches.later(parameter.register_hook(lambda _, key=key: used.add(key)).remove)

    def ddp_forward(self, original: Function, wrapper: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled() and wrapper.module.training
        self.inside.append(wrapper.module)
        try:
            with self.recorder.call(events.Forward(training, wrapper.require_backward_grad_sync)):
                return original(wrapper, *inputs, **kwargs)
        except RuntimeError as error:
            if "did not receive grad" in str(error):
                self._record_unused(wrapper.module, str(error))
            raise
        finally:
            self.inside.pop()

    @never_raises
    def _record_unused(self, module: nn.Module, error: str) -> None:
        """Name the parameters whose numbers are in DDP's error."""
        numbers = re.search(r"indices which did not receive grad for rank \d+:([ \d]+)", error)
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        chosen = [names[int(n)] for n in numbers[1].split() if int(n) < len(names)] if numbers else []
        self.recorder.write(events.UnusedParameters(chosen))

    @never_raises
    def _entered(self, module: nn.Module, number: int) -> None:
        if self.context.hidden or not (torch.is_grad_enabled() and module.training):
            return
        if not self.is_inside(module) and self.bypasses < _MOST_BYPASSES:
            self.bypasses += 1
            self.recorder.write(events.WrapperBypassed())
        n = self.forwards[number] = self.forwards.get(number, 0) + 1
        wrapper = self.context.wrappers[number]
        synchronised = not wrapper.broadcast_buffers or wrapper.require_forward_param_sync
        if should_sample(n) and synchronised:
            buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point() and b.numel()}
            self.recorder.write(events.Buffers(number, n, self.context.checksums(buffers), _local_norms(module)))

    @contextmanager
    def no_sync(self, original: Function, wrapper: DistributedDataParallel) -> Iterator[None]:
        number = next((n for n, w in enumerate(self.context.wrappers) if w is wrapper), -1)
        at, backwards, forwards = user_line(), self.context.backwards, self.forwards.get(number, 0)
        with original(wrapper):
            yield
        forwards = self.forwards.get(number, 0) - forwards
        self.recorder.write(events.NoSync(self.context.backwards - backwards, forwards, at=at))

    def unused_search_empty(self) -> bool | None:
        """Whether all wrappers that search for unused parameters found none in this step; None: none searches."""
        empty = None
        for wrapper, used in self.used.items():
            searched = {id(p) for p in self.context.wrappers[wrapper].parameters() if p.requires_grad}
            empty = empty is not False and searched <= used
            used.clear()
        return empty

    # -- FSDP and others ---------------------------------------------------------------------------------------------
    def fsdp_created(self, _: None, wrapper: nn.Module, *__: Any, **___: Any) -> None:
        self.context.shards.append(wrapper)
        self.context.covered |= {id(p) for p in wrapper.parameters()}
        self.recorder.write(events.FSDPInit())

    def sharded(self, _: Any, module: Any, *__: Any, **___: Any) -> None:
        for part in module if isinstance(module, (list, tuple)) else [module]:
            self.context.covered |= {id(p) for p in part.parameters()}
            self.patches.later(part.register_forward_pre_hook(Hook(self._enter_shard), prepend=True).remove)
            self.patches.later(part.register_forward_hook(Hook(self._leave_shard), always_call=True).remove)
        self.recorder.write(events.FSDPInit())

    def _enter_shard(self, module: nn.Module, _: Any) -> None:
        self.shard_depth += 1
        if self.shard_depth == 1 and not self.context.hidden:
            self.recorder.write(events.Forward(torch.is_grad_enabled() and module.training))

    def _leave_shard(self, *_: Any) -> None:
        self.shard_depth = max(0, self.shard_depth - 1)
        if self.shard_depth == 0 and not self.context.hidden:
            self.recorder.write(events.Return())

    def parallelized(self, _: Any, module: nn.Module, device_mesh: Any = None, *__: Any, **___: Any) -> None:
        ranks = device_mesh.mesh.flatten().tolist() if device_mesh is not None else range(self.context.world)
        self.recorder.write(events.TensorParallel(sorted(ranks)))


def _local_norms(module: nn.Module) -> list[str]:
    shared = (SyncBatchNorm, nn.SyncBatchNorm)
    norms = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, shared)]
    return [name for name, m in norms if m.training or not m.track_running_stats][:20]
