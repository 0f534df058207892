"""Checkpoints written and read, values logged, settings in the environment."""

import builtins
import operator
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..events import Environment, Load, LoadStateDict, Move, Print, Save, Scalar
from ..source import user_line
from .context import Context, never_raises
from .patch import Function

_PROGRESS = re.compile(
    r"(?!num_|max_|total_|n_|warmup_|.*_per_)(.+_)?(epoch|step|iter(ation)?)s?(_(run|num|idx|count|done))?"
    r"|globalstep|num_updates|n_iter|consumed_samples|tokens_seen",
    re.IGNORECASE,
)
"""Names under which a checkpoint says how far training was."""


def install(context: Context) -> None:
    probe = Files(context)
    context.watch(torch, "save", probe.save)
    context.watch(torch, "load", probe.load)
    for owner, name in ((os, "replace"), (os, "rename"), (shutil, "move")):
        context.watch(owner, name, probe.move)
    context.watch(nn.Module, "load_state_dict", partial(probe.load_state_dict, "model"))
    context.watch(Optimizer, "load_state_dict", partial(probe.load_state_dict, "optimizer"))
    context.watch(builtins, "print", probe.print)
    context.watch(type(os.environ), "__setitem__", probe.set_variable)
    context.patches.when_imported("torch.utils.tensorboard.writer", probe.tensorboard)


class Files:
    """State of the probes of what one rank writes and reads."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # which the audit sets

    def save(self, original: Function, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            self._saved(obj, Path(f).absolute())
        with self.recorder.hide():
            return original(obj, f, *args, **kwargs)

    @never_raises
    def _saved(self, obj: Any, path: Path) -> None:
        keys = _weight_names(obj)
        prefixed = "n_averaged" not in obj and any(k.startswith("module.") for k in keys) if keys else False
        self.recorder.write(Save(str(path), path.exists(), keys[:5], prefixed))

    def load(self, original: Function, f: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.hide():
            result = original(f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)):
            self._loaded(result, Path(f).absolute())
        return result

    @never_raises
    def _loaded(self, obj: Any, path: Path) -> None:
        entries = obj if isinstance(obj, dict) else {}
        progress = [k for k, v in entries.items() if isinstance(k, str) and _PROGRESS.fullmatch(k) and _is_count(v)]
        optimizer = any(isinstance(v, dict) and {"state", "param_groups"} <= set(v) for v in entries.values())
        self.recorder.write(Load(str(path), progress, optimizer))

    def move(self, original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        if (at := user_line()) is not None:
            self.recorder.write(Move(str(Path(os.fsdecode(src)).absolute()), at=at))
        return original(src, dst, *args, **kwargs)

    def load_state_dict(
        self, target: Literal["model", "optimizer"], original: Function, owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.recorder.write(LoadStateDict(target))
        with self.recorder.hide():
            return original(owner, *args, **kwargs)

    def print(self, original: Function, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("file") is None and not self.recorder.in_worker:
            self.context.prints += 1
            if self.context.prints == 1:
                self.recorder.write(Print())
        original(*args, **kwargs)

    def tensorboard(self, module: ModuleType) -> None:
        self.context.watch(module.SummaryWriter, "add_scalar", self.add_scalar)

    def add_scalar(
        self, original: Function, writer: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._logged(writer, tag, scalar_value, kwargs.get("global_step", args[0] if args else None))
        return original(writer, tag, scalar_value, *args, **kwargs)

    @never_raises
    def _logged(self, writer: Any, tag: str, value: Any, step: Any) -> None:
        with self.recorder.hide():
            self.recorder.write(Scalar(tag, float(value), writer.get_logdir(), step))

    def set_variable(self, original: Function, environment: Any, name: str, value: str) -> None:
        if environment is os.environ and (at := user_line()) is not None:
            self.recorder.write(Environment(name, value, self.environment.get(name), at=at))
        original(environment, name, value)


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
