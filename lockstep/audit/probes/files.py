"""Checkpoints written and read, values logged, settings in the environment."""

import builtins
import operator
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..events import Environment, Load, LoadStateDict, Move, Print, Save, Scalar
from ..source import user_line
from .context import Context

_PROGRESS = re.compile(
    r"(?!num_|max_|total_|n_|warmup_|.*_per_)(.+_)?(epoch|step|iter(ation)?)s?(_(run|num|idx|count|done))?"
    r"|globalstep|num_updates|n_iter|consumed_samples|tokens_seen",
    re.IGNORECASE,
)
"""Names under which a checkpoint says how far training was."""


def install(context: Context) -> None:
    probe = Files(context)
    context.watch(torch, "save", probe.save, hide=True)
    context.watch(torch, "load", after=probe.loaded, hide=True)
    for owner, name in ((os, "replace"), (os, "rename"), (shutil, "move")):
        context.watch(owner, name, probe.move)
    context.watch(nn.Module, "load_state_dict", context.writes(LoadStateDict, "model"), hide=True)
    context.watch(Optimizer, "load_state_dict", context.writes(LoadStateDict, "optimizer"), hide=True)
    context.watch(builtins, "print", probe.print)
    context.watch(type(os.environ), "__setitem__", probe.set_variable)
    context.watch("torch.utils.tensorboard.writer:SummaryWriter", "add_scalar", probe.add_scalar)


class Files:
    """State of the probes of what one rank writes and reads."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # which the audit sets

    def save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            path, keys = Path(f).absolute(), _weight_names(obj)
            prefixed = "n_averaged" not in obj and any(k.startswith("module.") for k in keys) if keys else False
            self.recorder.write(Save(str(path), path.exists(), keys[:5], prefixed))

    def loaded(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            entries = obj if isinstance(obj, dict) else {}
            named = [(k, v) for k, v in entries.items() if isinstance(k, str)]
            progress = [k for k, v in named if _PROGRESS.fullmatch(k) and _is_count(v)]
            optimizer = any(isinstance(v, dict) and {"state", "param_groups"} <= set(v) for v in entries.values())
            self.recorder.write(Load(str(Path(f).absolute()), progress, optimizer))

    def move(self, src: Any, *_: Any, **__: Any) -> None:
        if (at := user_line()) is not None:
            self.recorder.write(Move(str(Path(os.fsdecode(src)).absolute()), at=at))

    def print(self, *_: Any, file: Any = None, **__: Any) -> None:
        if file is None and not self.recorder.in_worker:
            self.context.prints += 1
            if self.context.prints == 1:
                self.recorder.write(Print())

    def add_scalar(self, writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> None:
        with self.recorder.hide():
            self.recorder.write(Scalar(tag, float(scalar_value), writer.get_logdir(), global_step))

    def set_variable(self, environment: Any, name: str, value: str) -> None:
        if environment is os.environ and (at := user_line()) is not None:
            self.recorder.write(Environment(name, value, self.environment.get(name), at=at))


def _is_count(value: Any) -> bool:
    try:
        return operator.index(value) >= 0 and not isinstance(value, bool)
    except (TypeError, RuntimeError):
        return False


def _weight_names(obj: Any) -> list[str]:
    """Names of the weights in a checkpoint, at the top or one level down."""
    if not isinstance(obj, dict):
        return []
    levels = [obj, *(v for v in obj.values() if isinstance(v, dict))]
    return [str(k) for level in levels for k, v in level.items() if isinstance(v, torch.Tensor)]
