"""Accelerate and Lightning on a machine without a GPU: told to use the CPU, with as many processes as there are ranks.

By default they would find no GPU, use one CPU process, and train separately in every rank.
"""

import os
from functools import partial

from ..events import Device
from ..patch import Arguments, Patches
from ..recorder import Recorder

_LIGHTNING = (
    "lightning.pytorch.trainer.trainer:Trainer",
    "pytorch_lightning.trainer.trainer:Trainer",
    "lightning.fabric.fabric:Fabric",
    "lightning_fabric.fabric:Fabric",
)
_BFLOAT16 = {16: "bf16-mixed", "16": "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}
"""The precision used on the CPU instead of float16."""


def install(recorder: Recorder, patches: Patches, nproc: int) -> None:
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    patches.edit_arguments("accelerate.accelerator:Accelerator", "__init__", partial(_accelerate, recorder))
    for trainer in _LIGHTNING:
        patches.edit_arguments(trainer, "__init__", partial(_lightning, recorder, nproc))


def _accelerate(recorder: Recorder, arguments: Arguments) -> None:
    if not arguments.get("cpu"):
        _record_gpu(recorder)
    if str(arguments.get("mixed_precision")) == "fp16":
        arguments["mixed_precision"] = "bf16"


def _lightning(recorder: Recorder, nproc: int, arguments: Arguments) -> None:
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
    recorder.write(Device("framework", -1))
