"""Accelerate and Lightning on a machine without a GPU: told to use the CPU, with as many processes as there are ranks.

By default they would find no GPU, use one CPU process, and train separately in every rank.
"""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..patch import Function, Patches
from ..trace import Recorder

_LIGHTNING = (
    ("Trainer", "lightning.pytorch.trainer.trainer"),
    ("Trainer", "pytorch_lightning.trainer.trainer"),
    ("Fabric", "lightning.fabric.fabric"),
    ("Fabric", "lightning_fabric.fabric"),
)
_BFLOAT16 = {16: "bf16-mixed", "16": "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}
"""The precision used on the CPU instead of float16."""


def install(recorder: Recorder, patches: Patches, nproc: int) -> None:
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    _patch(patches, "accelerate.accelerator", "Accelerator", partial(_accelerate, recorder))
    for name, module in _LIGHTNING:
        _patch(patches, module, name, partial(_lightning, recorder, nproc))


def _patch(patches: Patches, module: str, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the arguments of the class's __init__, by name."""

    def init(original: Function, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(*args, **kwargs)
        change(call.arguments)
        original(*call.args, **call.kwargs)

    patches.when_imported(module, lambda imported: patches.intercept(vars(imported)[name], "__init__", init))


def _accelerate(recorder: Recorder, arguments: dict[str, Any]) -> None:
    if not arguments.get("cpu"):
        _record_gpu(recorder)
    if str(arguments.get("mixed_precision")) == "fp16":
        arguments["mixed_precision"] = "bf16"


def _lightning(recorder: Recorder, nproc: int, arguments: dict[str, Any]) -> None:
    if arguments.get("accelerator", "auto") not in ("auto", "gpu", "cuda"):
        return
    _record_gpu(recorder)
    arguments["accelerator"] = "cpu"
    devices = arguments.get("devices", "auto")
    if devices not in (1, "1") and not (isinstance(devices, list) and len(devices) == 1):  # one: the script's choice
        arguments |= {"devices": nproc, "num_nodes": 1}
    if arguments.get("precision") in _BFLOAT16:
        arguments["precision"] = _BFLOAT16[arguments["precision"]]


def _record_gpu(recorder: Recorder) -> None:
    recorder.on_gpu = True
    recorder.write("device", op="framework", index=-1)
