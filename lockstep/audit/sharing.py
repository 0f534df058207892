"""A script that asks for a GPU for each rank, where there are fewer: all ranks are on the first, over real NCCL.

NCCL takes several ranks on one GPU if each says that it is on a machine of its own. The script is not told: it counts
as many GPUs as there are ranks, and whichever it asks for is the first.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .devices import Devices, Instead, generator_on, is_cuda
from .events import Device
from .probes.patch import Function, Patches
from .recorder import Recorder
from .source import OURS, foreign, generated

_FIRST = torch.device("cuda", 0)
_PACKAGES = Path(torch.__file__).parents[1]
_DEEP = tuple(f"{_PACKAGES / name}{os.sep}" for name in ("torch", "triton"))
"""Those who drive the GPU have to know how things are."""


def install(recorder: Recorder, patches: Patches, gpus: int) -> None:
    """Let this process believe that it has `gpus` GPUs."""
    chosen = Devices(recorder, _FIRST, gpus)
    counted = torch.cuda.device_count
    for owner, count, choose, current, within in (
        (torch.cuda, "device_count", "set_device", "current_device", "device"),
        (torch.accelerator, "device_count", "set_device_index", "current_device_index", "device_index"),
    ):
        patches.wrap(owner, count, lambda original: lambda: original() if _is_deep(_asker()) else chosen.gpus)
        patches.wrap(owner, choose, lambda original: _chosen(original, chosen))
        patches.wrap(owner, current, lambda original: lambda: original() if foreign(_asker()) else chosen.current)
        patches.replace(owner, within, chosen.within(lambda: not _is_deep(_asker())))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and "_get_device_index" in vars(module):
            patches.wrap(module, "_get_device_index", _index)
    for name in ("get_rng_state", "set_rng_state"):
        patches.wrap(torch.cuda, name, _with_first)
        patches.wrap(torch.cuda.random, name, _with_first)
    patches.wrap(torch, "load", _load)
    patches.wrap(torch.storage._StorageBase, "to", _with_first)
    patches.replace(torch, "Generator", generator_on(_first))
    for name in ("init_process_group", "new_group", "barrier"):
        patches.wrap(dist, name, _keywords)
    patches.wrap(DistributedDataParallel, "__init__", lambda original: _ddp(original, chosen))
    patches.when_imported(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        lambda module: patches.wrap(module.FullyShardedDataParallel, "__init__", partial(_fsdp, chosen)),
    )
    patches.wrap(os, "putenv", lambda original: _visible(original, chosen, counted))
    Instead(chosen).install(patches)


def _visible(original: Function, chosen: Devices, counted: Function) -> Function:
    """A script that lets each rank see one GPU only: CUDA is started before it does, since only one is there."""

    def putenv(name: Any, value: Any) -> None:
        words = os.fsdecode(value).split(",")
        late = torch.cuda.is_initialized() or chosen.recorder.in_worker  # it has no effect any more, or none on us
        if os.fsdecode(name) == "CUDA_VISIBLE_DEVICES" and words[0] not in ("", "-1") and not late:
            torch.cuda.init()
            counted()  # torch remembers the answer
            chosen.gpus = len(words)
        original(name, value)

    return putenv


def _asker() -> str:
    """The file of the code that called a function which is replaced here, perhaps through a class of ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_back and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame.f_code.co_filename if frame else ""


def _is_deep(file: str) -> bool:
    return file.startswith(_DEEP) or generated(file)


def _chosen(original: Function, chosen: Devices) -> Function:
    def choose(device: Any) -> None:
        if not _is_deep(_asker()):
            chosen.choose(device)
        original(_FIRST)

    return choose


def _first(thing: Any) -> Any:
    """What was said of devices, said of the first GPU."""
    if isinstance(thing, dict):
        return {key: _first(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_first(value) for value in thing]
    if type(thing) is int:
        return 0
    return (str(_FIRST) if isinstance(thing, str) else _FIRST) if is_cuda(thing) else thing


def _index(original: Function) -> Function:
    return lambda *args, **kwargs: min(0, original(*args, **kwargs))  # -1: the CPU


def _with_first(original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: _first(v) if k == "device" else v for k, v in kwargs.items()}
        return original(*(a if isinstance(a, torch.Tensor) else _first(a) for a in args), **kwargs)

    return call


def _load(original: Function) -> Function:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, _first(map_location), *args, **kwargs)

    return load


def _keywords(original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{k: _first(v) if k in ("device_id", "device_ids") else v for k, v in kwargs.items()})

    return call


def _fsdp(chosen: Devices, original: Function) -> Function:
    def __init__(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if device_id is not None:
            chosen.use(device_id)
        original(*args, device_id=_first(device_id), **kwargs)

    return __init__


def _ddp(original: Function, chosen: Devices) -> Function:
    def __init__(
        wrapper: Any, /, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **kw: Any
    ) -> None:
        real = bool(device_ids) and (chosen.index(device_ids[0]) or chosen.current == 0)
        if device_ids and (real or (type(device_ids[0]) is int and not foreign(_asker()))):
            chosen.recorder.write(Device("device_ids", chosen.index(device_ids[0])))
        original(wrapper, module, _first(device_ids), _first(output_device), *a, **kw)

    return __init__
