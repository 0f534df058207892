"""Accelerate and Lightning on a machine without a GPU: told to take the CPU, with as many processes as there are ranks.

Left to themselves they would find no GPU, take one processor, and train alone in every rank.
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from .events import Device
from .probes.patch import Function, Patches
from .recorder import Recorder

_LIGHTNING = (
    ("Trainer", "lightning.pytorch.trainer.trainer"),
    ("Trainer", "pytorch_lightning.trainer.trainer"),
    ("Fabric", "lightning.fabric.fabric"),
    ("Fabric", "lightning_fabric.fabric"),
)
_HALF = {16: "bf16-mixed", "16": "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}


def install(recorder: Recorder, patches: Patches, ranks: int) -> None:
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    patches.when_imported(
        "accelerate.accelerator", partial(_wrap, patches, "Accelerator", partial(_accelerate, recorder))
    )
    around = partial(_lightning, recorder, ranks)
    for name, module in _LIGHTNING:
        patches.when_imported(module, partial(_wrap, patches, name, around))


def _wrap(patches: Patches, name: str, around: Callable[[Function], Function], module: ModuleType) -> None:
    patches.wrap(vars(module)[name], "__init__", around)


def _accelerate(recorder: Recorder, original: Function) -> Function:
    def __init__(accelerator: Any, /, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(original).bind(accelerator, *args, **kwargs)
        if not asked.arguments.get("cpu"):
            recorder.on_gpu = True
            recorder.write(Device("framework", -1))
        if str(asked.arguments.get("mixed_precision")) == "fp16":
            asked.arguments["mixed_precision"] = "bf16"
        original(*asked.args, **asked.kwargs)

    return __init__


def _lightning(recorder: Recorder, ranks: int, original: Function) -> Function:
    def __init__(trainer: Any, /, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(original).bind(trainer, *args, **kwargs)
        if asked.arguments.get("accelerator", "auto") in ("auto", "gpu", "cuda"):
            recorder.on_gpu = True
            recorder.write(Device("framework", -1))
            asked.arguments["accelerator"] = "cpu"
            devices = asked.arguments.get("devices", "auto")
            if devices not in (1, "1") and not (isinstance(devices, list) and len(devices) == 1):  # not to train alone
                asked.arguments |= {"devices": ranks, "num_nodes": 1}
            if asked.arguments.get("precision") in _HALF:
                asked.arguments["precision"] = _HALF[asked.arguments["precision"]]
        original(*asked.args, **asked.kwargs)

    return __init__
