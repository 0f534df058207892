"""A script that asks for GPUs, on a machine without: CUDA becomes the CPU, NCCL becomes gloo.

What the script asks for is still written down (which device each rank wanted, which precision), so that what is wrong
with it is found here as it would be there. What cannot be had is said in the report.
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
from torch.nn.parallel import DistributedDataParallel

from ..parallel import sync_batch_norm
from .devices import Devices, Instead, generator_on
from .probes.patch import Function, Patches
from .trace import Recorder, foreign

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_LOCKSTEP = str(Path(__file__).parents[1]) + os.sep


def install(recorder: Recorder, patches: Patches, gpus: int) -> None:
    """Let this process believe that it has `gpus` GPUs."""
    chosen = Devices(recorder, _CPU, gpus)
    for name, answer in _ANSWERS.items():
        if hasattr(torch.cuda, name):  # some come and go with versions of torch
            patches.wrap(torch.cuda, name, partial(_always, answer))
    patches.replace(torch.cuda, "cudart", _Queue)
    for name in ("start", "stop"):
        patches.wrap(torch.cuda.profiler, name, partial(_always, None))
    for name in ("_record_memory_history", "_dump_snapshot"):
        patches.wrap(torch.cuda.memory, name, partial(_always, None))
    for name in (n for n in vars(torch.cuda) if n.endswith("Tensor") and hasattr(torch, n)):
        patches.replace(torch.cuda, name, getattr(torch, name))
    patches.wrap(torch, "set_default_tensor_type", lambda original: lambda t: original(_plain(t)))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.wrap(torch.cuda.nvtx, name, partial(_always, 0))
    for name in ("get_rng_state", "get_rng_state_all"):
        patches.wrap(torch.cuda, name, lambda _: lambda *args, **kwargs: torch.get_rng_state())
    for name in ("manual_seed", "manual_seed_all"):
        patches.wrap(torch.cuda, name, lambda _: lambda seed: torch.default_generator.manual_seed(seed))
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        patches.replace(torch.cuda, name, _Queue)
    patches.replace(torch.cuda, "device", chosen.within(lambda: True))
    if hasattr(torch, "accelerator"):
        patches.wrap(torch.accelerator, "is_available", lambda _: lambda: _asked_by_user())
        patches.wrap(torch.accelerator, "device_count", lambda _: lambda: gpus if _asked_by_user() else 0)
        patches.wrap(torch.accelerator, "current_accelerator", _accelerator)
        patches.wrap(torch.accelerator, "set_device_index", lambda _: lambda device: chosen.choose(device))
        patches.wrap(torch.accelerator, "current_device_index", lambda _: lambda: chosen.current)
        patches.wrap(torch.accelerator, "synchronize", partial(_always, None))
        patches.replace(torch.accelerator, "device_index", chosen.within(lambda: True))
    patches.wrap(torch.cuda, "is_available", lambda _: lambda: _asked_by_user())
    patches.wrap(torch.cuda, "device_count", lambda _: lambda: gpus if _asked_by_user() else 0)
    patches.wrap(torch.cuda, "set_device", lambda _: lambda device: chosen.choose(device))
    patches.wrap(torch.cuda, "current_device", lambda _: lambda: chosen.current)
    patches.wrap(torch.cuda, "get_device_name", lambda _: lambda *_, **__: "CPU in the place of a GPU")
    patches.wrap(torch, "load", _load)
    patches.replace(torch, "Generator", generator_on(lambda device: "cpu"))
    patches.wrap(torch, "compile", _compile)
    patches.wrap(torch.autocast, "__init__", _autocast)
    patches.wrap(torch.amp.GradScaler, "__init__", _scaler)
    patches.wrap(dist, "is_nccl_available", partial(_always, True))
    for name in ("init_process_group", "new_group"):
        patches.wrap(dist, name, _group)
    patches.wrap(DistributedDataParallel, "__init__", lambda original: _wrap(original, chosen))
    patches.when_imported(
        "torch.distributed.fsdp.fully_sharded_data_parallel", lambda module: _meet_fsdp(module, patches)
    )
    patches.when_imported("torch.distributed.checkpoint.state_dict_saver", lambda module: _meet_saver(module, patches))
    patches.wrap(nn.SyncBatchNorm, "convert_sync_batchnorm", _convert)
    _OnCpu(chosen).install(patches)


_ANSWERS: dict[str, Any] = {
    "synchronize": None,
    "empty_cache": None,
    "ipc_collect": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "is_bf16_supported": True,
    "get_device_capability": (8, 0),
    "get_device_properties": SimpleNamespace(
        name="CPU", total_memory=1 << 34, major=8, minor=0, multi_processor_count=1, uuid="CPU"
    ),
    "seed": None,
    "seed_all": None,
    "initial_seed": 0,
    "set_rng_state": None,
    "set_rng_state_all": None,
    "mem_get_info": (1 << 34, 1 << 34),
    "memory_stats": Counter(),
    "memory_summary": "",
    "reset_max_memory_allocated": None,
    "reset_max_memory_cached": None,
    "reset_accumulated_memory_stats": None,
    "set_per_process_memory_fraction": None,
    "utilization": 0,
    "init": None,
    "set_sync_debug_mode": None,
    "get_sync_debug_mode": 0,
    "set_stream": None,
}


def _asked_by_user() -> bool:
    """Whether the script itself asks. Accelerate and Lightning are told elsewhere, Lockstep finds its own way."""
    file = sys._getframe(2).f_code.co_filename
    return not foreign(file) and not file.startswith(_LOCKSTEP)


class _Queue:
    """A stream or an event where there is only one queue, the processor's: everything is in order already."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.at = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: "_Queue") -> float:
        return 1000 * (later.at - self.at)

    def __enter__(self) -> "_Queue":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Function:
        return lambda *args, **kwargs: True if name == "query" else None


def _plain(kind: Any) -> Any:
    """The name of a type of tensors, without its device."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def _always(answer: Any, original: Function) -> Function:
    return lambda *args, **kwargs: answer


class _OnCpu(Instead):
    """A processor has no memory to pin, and no streams."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("pin_memory", "record_stream"):
            return args[0]
        args = tuple(map(_plain, args)) if func is torch.Tensor.type else args
        return super().__torch_function__(
            func, types, args, {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        )


def _accelerator(original: Function) -> Function:
    def current_accelerator(*args: Any, **kwargs: Any) -> Any:
        return _CUDA if _asked_by_user() else None

    return current_accelerator


def _load(original: Function) -> Function:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, "cpu", *args, **kwargs)

    return load


def _compile(original: Function) -> Function:
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module):
            vars(model)["_orig_mod"] = model  # not as one of its modules
        return model if model is not None else lambda function: function

    return compile


def _autocast(original: Function) -> Function:
    def __init__(region: Any, /, device_type: str = "cuda", dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        on_cuda = device_type == "cuda"
        region.asked_dtype = dtype or (torch.float16 if on_cuda else torch.bfloat16)
        original(region, "cpu", torch.bfloat16, *args, **kwargs)

    return __init__


def _scaler(original: Function) -> Function:
    def __init__(scaler: Any, /, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(scaler, "cpu", *args, **kwargs)

    return __init__


def _group(original: Function) -> Function:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        args = tuple("gloo" if isinstance(a, str) and "nccl" in a else a for a in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return original(*args, **kwargs)

    return make


def _wrap(original: Function, chosen: Devices) -> Function:
    def __init__(
        wrapper: Any, /, module: nn.Module, device_ids: Any = None, output: Any = None, *a: Any, **kw: Any
    ) -> None:
        if device_ids:
            chosen.recorder.write("device", op="device_ids", index=chosen.index(device_ids[0]))
        kw.pop("output_device", None)
        original(wrapper, module, None, None, *a, **kw)

    return __init__


def _meet_fsdp(module: ModuleType, patches: Patches) -> None:
    """FSDP's first version, which is all on the CPU already: nothing is brought there, or sent from there."""
    fsdp = module.FullyShardedDataParallel
    patches.wrap(fsdp, "__init__", _flat)
    patches.wrap(fsdp, "set_state_dict_type", _stays)
    initial, check = (
        sys.modules.get("torch.distributed.fsdp._init_utils"),
        "_check_module_states_for_sync_module_states",
    )
    if hasattr(initial, check):  # that they are on a GPU
        patches.wrap(initial, check, partial(_always, None))


def _flat(original: Function) -> Function:
    def __init__(*args: Any, **kwargs: Any) -> None:
        if len(args) > 4:  # said by its place, after the module, the group and the strategy
            args = (*args[:4], None, *args[5:])
        else:
            kwargs["cpu_offload"] = None
        original(*args, **kwargs | {"device_id": _CPU})

    return __init__


def _stays(original: Function) -> Function:
    def set_state_dict_type(*args: Any, **kwargs: Any) -> Any:
        for config in (*args, *kwargs.values()):
            if getattr(config, "offload_to_cpu", False):
                config.offload_to_cpu = False
        return original(*args, **kwargs)

    return set_state_dict_type


def _meet_saver(module: ModuleType, patches: Patches) -> None:
    """What is saved beside the training speaks over gloo, over which the training speaks here as well: one by one."""

    def at_once(original: Function) -> Function:
        def async_save(state_dict: Any, **kwargs: Any) -> Any:
            known = inspect.signature(module.save).parameters
            done: Future[Any] = Future()
            done.set_result(module.save(state_dict, **{k: v for k, v in kwargs.items() if k in known}))
            return done

        return async_save

    patches.wrap(module, "async_save", at_once)


def _convert(original: Function) -> Function:
    def convert_sync_batchnorm(kind: Any, module: nn.Module, process_group: Any = None) -> nn.Module:
        holder = nn.Sequential(module)
        sync_batch_norm(holder)
        return holder[0]

    return convert_sync_batchnorm


def needed(device: str) -> bool:
    """Whether scripts that ask for CUDA have to be mapped onto the CPU here."""
    return device == "cpu" or (device == "auto" and not _has_gpu())


def _has_gpu() -> bool:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking must not start CUDA: ranks are forked
    return torch.cuda.device_count() > 0
