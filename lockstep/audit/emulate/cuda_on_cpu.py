"""CUDA on a machine without a GPU: CUDA becomes the CPU, NCCL becomes gloo.

What the script requests is still recorded (the device of each rank, the precision), so that the judges find the same
bugs as on GPUs. The report says what could not be emulated.
"""

import inspect
import os
import sys
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...batchnorm import SyncBatchNorm, replace_batch_norm
from ..patch import Arguments, Function, Patches
from ..recorder import Recorder
from ..source import foreign
from .devices import DEVICE_FUNCTIONS, FSDP, DeviceRedirect, VirtualGpus, redirect_ddp, redirect_load

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_LOCKSTEP = str(Path(__file__).parents[2]) + os.sep
_MEMORY = 1 << 34
_PROPERTIES = SimpleNamespace(name="CPU", total_memory=_MEMORY, major=8, minor=0, multi_processor_count=1, uuid="CPU")
_CONSTANTS: tuple[tuple[Any, Any, tuple[str, ...]], ...] = (
    (torch.cuda, None, ("init", "synchronize", "set_stream", "empty_cache", "ipc_collect", "seed", "seed_all")),
    (torch.cuda, None, ("set_rng_state", "set_rng_state_all", "set_sync_debug_mode")),
    (torch.cuda, None, ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")),
    (torch.cuda, None, ("reset_accumulated_memory_stats", "set_per_process_memory_fraction")),
    (torch.cuda, 0, ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")),
    (torch.cuda, 0, ("initial_seed", "utilization", "get_sync_debug_mode")),
    (torch.cuda, True, ("is_bf16_supported",)),
    (torch.cuda, (8, 0), ("get_device_capability",)),
    (torch.cuda, "CPU in place of a GPU", ("get_device_name",)),
    (torch.cuda, _PROPERTIES, ("get_device_properties",)),
    (torch.cuda, (_MEMORY, _MEMORY), ("mem_get_info",)),
    (torch.cuda, Counter(), ("memory_stats",)),
    (torch.cuda, "", ("memory_summary",)),
    (torch.cuda.memory, None, ("_record_memory_history", "_dump_snapshot")),
    (torch.cuda.profiler, None, ("start", "stop")),
    (torch.cuda.nvtx, 0, ("range_push", "range_pop", "mark", "range_start", "range_end")),
    (torch.accelerator, None, ("synchronize",)),
    (dist, True, ("is_nccl_available",)),
)
"""Functions that always return the same value here."""


def is_needed(device: str) -> bool:
    """Whether `--device` or the lack of a GPU puts CUDA on the CPU."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not start CUDA: ranks are forked
    return device == "cpu" or (device == "auto" and torch.cuda.device_count() == 0)


def install(recorder: Recorder, patches: Patches, count: int) -> None:
    """Make this process see `count` GPUs."""
    gpus = VirtualGpus(recorder, _CPU, count)
    for owner, value, names in _CONSTANTS:
        for name in names:
            if hasattr(owner, name):  # some come and go with versions of torch
                patches.wrap(owner, name, _returns(value))
    _patch_devices(patches, gpus)
    _patch_streams_and_types(patches)
    patches.intercept(torch, "compile", _compile)
    patches.edit_arguments(torch.autocast, "__init__", _autocast)
    patches.edit_arguments(torch.amp.GradScaler, "__init__", lambda arguments: arguments.update(device="cpu"))
    _patch_distributed(patches, gpus)
    _CpuRedirect(gpus).install(patches)


def _patch_devices(patches: Patches, gpus: VirtualGpus) -> None:
    for owner, count, set_device, current_device, context in DEVICE_FUNCTIONS:
        patches.wrap(owner, "is_available", lambda _: lambda: _called_by_user())
        patches.wrap(owner, count, lambda _: lambda: gpus.count if _called_by_user() else 0)
        patches.wrap(owner, set_device, lambda _: lambda device: gpus.set_current(device))
        patches.wrap(owner, current_device, lambda _: lambda: gpus.current)
        patches.replace(owner, context, gpus.context_manager(lambda: True))
    patches.wrap(
        torch.accelerator, "current_accelerator", lambda _: lambda *_, **__: _CUDA if _called_by_user() else None
    )


def _patch_streams_and_types(patches: Patches) -> None:
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "cudart"):
        patches.replace(torch.cuda, name, _CpuStream)
    for name in (n for n in vars(torch.cuda) if n.endswith("Tensor") and hasattr(torch, n)):
        patches.replace(torch.cuda, name, getattr(torch, name))
    patches.wrap(torch, "set_default_tensor_type", lambda original: lambda t: original(_cpu_type(t)))
    for name in ("get_rng_state", "get_rng_state_all"):
        patches.wrap(torch.cuda, name, lambda _: lambda *args, **kwargs: torch.get_rng_state())
    for name in ("manual_seed", "manual_seed_all"):
        patches.wrap(torch.cuda, name, lambda _: lambda seed: torch.default_generator.manual_seed(seed))
    redirect_load(patches, lambda device: "cpu")


def _patch_distributed(patches: Patches, gpus: VirtualGpus) -> None:
    for name in ("init_process_group", "new_group"):
        patches.edit_arguments(dist, name, _gloo)
    redirect_ddp(patches, gpus, lambda devices: None, lambda device: True)
    patches.intercept(nn.SyncBatchNorm, "convert_sync_batchnorm", _sync_batchnorm)
    # FSDP1 has all its tensors on the CPU already: no moves, no offload
    patches.edit_arguments(FSDP, "__init__", lambda arguments: arguments.update(cpu_offload=None, device_id=_CPU))
    patches.edit_arguments(FSDP, "set_state_dict_type", _without_offload)
    patches.when_imported("torch.distributed.fsdp._init_utils", partial(_skip_device_check, patches))
    patches.intercept("torch.distributed.checkpoint.state_dict_saver", "async_save", _save_now)


def _called_by_user() -> bool:
    """Whether the script itself calls: neither a framework, which is told to use the CPU elsewhere, nor Lockstep."""
    file = sys._getframe(2).f_code.co_filename
    return not foreign(file) and not file.startswith(_LOCKSTEP)


def _returns(value: Any) -> Function:
    return lambda original: lambda *args, **kwargs: value


class _CpuStream:
    """A stream or an event on the CPU, where each operation is complete when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.recorded_at = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, end: "_CpuStream") -> float:
        return 1000 * (end.recorded_at - self.recorded_at)

    def __enter__(self) -> "_CpuStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Function:
        return lambda *args, **kwargs: True if name == "query" else None


def _cpu_type(tensor_type: Any) -> Any:
    """Return the name of a tensor type without its device."""
    return tensor_type.replace("torch.cuda.", "torch.") if isinstance(tensor_type, str) else tensor_type


class _CpuRedirect(DeviceRedirect):
    """Without pinned memory and streams, which a CPU does not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("pin_memory", "record_stream"):
            return args[0]
        args = tuple(map(_cpu_type, args)) if func is torch.Tensor.type else args
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return super().__torch_function__(func, types, args, kwargs)


def _compile(original: Function, model: Any = None, **kwargs: Any) -> Any:
    if isinstance(model, nn.Module):
        vars(model)["_orig_mod"] = model  # not registered as a submodule
    return model if model is not None else lambda function: function


def _autocast(arguments: Arguments) -> None:
    default = torch.float16 if arguments["device_type"] == "cuda" else torch.bfloat16
    arguments["self"].asked_dtype = arguments.get("dtype") or default
    arguments.update(device_type="cpu", dtype=torch.bfloat16)


def _gloo(arguments: Arguments) -> None:
    arguments.pop("device_id", None)
    if "nccl" in str(arguments.get("backend")):
        arguments["backend"] = "gloo"


def _skip_device_check(patches: Patches, init_utils: ModuleType) -> None:
    requires_gpu = "_check_module_states_for_sync_module_states"
    if hasattr(init_utils, requires_gpu):
        patches.wrap(init_utils, requires_gpu, _returns(None))


def _without_offload(arguments: Arguments) -> None:
    for config in arguments.values():
        if getattr(config, "offload_to_cpu", False):
            config.offload_to_cpu = False


def _save_now(original: Function, state_dict: Any, **kwargs: Any) -> Future[Any]:
    """Save before returning: here saving and training would use the same gloo group at the same time."""
    save = sys.modules[original.__module__].save
    known = inspect.signature(save).parameters
    future: Future[Any] = Future()
    future.set_result(save(state_dict, **{k: v for k, v in kwargs.items() if k in known}))
    return future


def _sync_batchnorm(original: Function, cls: Any, module: nn.Module, process_group: Any = None) -> nn.Module:
    parent = nn.Sequential(module)
    replace_batch_norm(parent, SyncBatchNorm)
    return parent[0]
