"""Several ranks on one GPU, over real NCCL, for a script that expects a GPU for each rank.

NCCL accepts several ranks on one GPU if each has a host id of its own. The script sees as many GPUs as there are ranks,
and whichever it requests is the first one.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..patch import Arguments, Function, Patches
from ..recorder import Recorder
from ..source import caller, foreign, generated
from .devices import DEVICE_FUNCTIONS, FSDP, DeviceRedirect, VirtualGpus, is_cuda, redirect_ddp, redirect_load

_FIRST = torch.device("cuda", 0)
_PACKAGES = Path(torch.__file__).parents[1]
_DRIVERS = tuple(f"{_PACKAGES / name}{os.sep}" for name in ("torch", "triton"))
"""Code that drives the GPU needs the real number of GPUs and the real index."""


def install(recorder: Recorder, patches: Patches, count: int) -> None:
    """Make this process see `count` GPUs."""
    gpus = VirtualGpus(recorder, _FIRST, count)
    real_count = torch.cuda.device_count
    for owner, device_count, set_device, current_device, context in DEVICE_FUNCTIONS:
        patches.wrap(owner, device_count, lambda original: lambda: original() if _called_by_driver() else gpus.count)
        patches.intercept(owner, set_device, partial(_set_device, gpus))
        patches.wrap(owner, current_device, lambda real: lambda: real() if foreign(caller().file) else gpus.current)
        patches.replace(owner, context, gpus.context_manager(lambda: not _called_by_driver()))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and "_get_device_index" in vars(module):
            patches.wrap(module, "_get_device_index", _get_device_index)
    for name in ("get_rng_state", "set_rng_state"):
        patches.intercept(torch.cuda, name, _redirect_all)
        patches.intercept(torch.cuda.random, name, _redirect_all)
    patches.intercept(torch.storage._StorageBase, "to", _redirect_all)
    redirect_load(patches, _to_first)
    for name in ("init_process_group", "new_group", "barrier"):
        patches.edit_arguments(dist, name, _redirect_devices)
    redirect_ddp(patches, gpus, _to_first, partial(_is_request, gpus))
    patches.edit_arguments(FSDP, "__init__", partial(_fsdp, gpus))
    patches.intercept(os, "putenv", partial(_putenv, gpus, real_count))
    DeviceRedirect(gpus).install(patches)


def _putenv(gpus: VirtualGpus, real_count: Function, original: Function, name: Any, value: Any) -> None:
    """Initialise CUDA before a script sets CUDA_VISIBLE_DEVICES for each rank: there is only one GPU to select."""
    visible = os.fsdecode(value).split(",")
    has_effect = not torch.cuda.is_initialized() and not gpus.recorder.in_worker
    if os.fsdecode(name) == "CUDA_VISIBLE_DEVICES" and visible[0] not in ("", "-1") and has_effect:
        torch.cuda.init()
        real_count()  # torch caches the result
        gpus.count = len(visible)
    original(name, value)


def _called_by_driver() -> bool:
    file = caller().file
    return file.startswith(_DRIVERS) or generated(file)


def _set_device(gpus: VirtualGpus, original: Function, device: Any) -> None:
    if not _called_by_driver():
        gpus.set_current(device)
    original(_FIRST)


def _to_first(value: Any) -> Any:
    """Replace each GPU in `value` (an index, a name, a device, or a collection of them) by the first one."""
    if isinstance(value, dict):
        return {key: _to_first(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_first(item) for item in value]
    if type(value) is int:
        return 0
    return (str(_FIRST) if isinstance(value, str) else _FIRST) if is_cuda(value) else value


def _get_device_index(original: Function) -> Function:
    return lambda *args, **kwargs: min(0, original(*args, **kwargs))  # -1: the CPU


def _redirect_all(original: Function, *args: Any, **kwargs: Any) -> Any:
    kwargs = {k: _to_first(v) if k == "device" else v for k, v in kwargs.items()}
    return original(*(a if isinstance(a, torch.Tensor) else _to_first(a) for a in args), **kwargs)


def _redirect_devices(arguments: Arguments) -> None:
    arguments |= {k: _to_first(v) for k, v in arguments.items() if k in ("device_id", "device_ids")}


def _fsdp(gpus: VirtualGpus, arguments: Arguments) -> None:
    if arguments.get("device_id") is not None:
        gpus.record_use(arguments["device_id"])
    _redirect_devices(arguments)


def _is_request(gpus: VirtualGpus, device: Any) -> bool:
    """Whether a device id is the script's own: index 0 where another GPU is set may come from a tensor's device."""
    return gpus.index(device) > 0 or gpus.current == 0 or (type(device) is int and not foreign(caller().file))
