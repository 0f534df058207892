"""Checkpoints written and read, values logged, settings in the environment."""

import builtins
import json
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
from ..source import caller, foreign, user_line
from .context import Context, has_state

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
    context.watch(Optimizer, "load_state_dict", after=probe.optimizer_loaded, hide=True)
    context.watch("torch.distributed.checkpoint", "load", after=probe.shards_loaded)
    for name in ("load", "loads"):
        context.watch(json, name, after=probe.json_loaded)
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
            optimizer = any(isinstance(v, dict) and {"state", "param_groups"} <= set(v) for v in entries.values())
            self.recorder.write(Load(str(Path(f).absolute()), _progress(entries), optimizer))

    def shards_loaded(self, _: None, state_dict: Any, *__: Any, checkpoint_id: Any = None, **___: Any) -> None:
        """torch.distributed.checkpoint loads into the entries of a dict, and into the tensors that are there."""
        entries = [state_dict, *(v for v in state_dict.values() if isinstance(v, dict))]
        keys = {str(key) for entry in entries for key in entry}
        progress = [name for entry in entries for name in _progress(entry) if operator.index(entry[name]) > 0]
        self.recorder.write(Load(str(checkpoint_id or ""), progress, False, "dcp"))
        if any(isinstance(value, torch.Tensor) for entry in entries for value in entry.values()):
            self.recorder.write(LoadStateDict("model"))
        if any("optim" in key or key in ("param_groups", "state") for key in keys):
            self.recorder.write(LoadStateDict("optimizer"))

    def json_loaded(self, obj: Any, source: Any, *_: Any, **__: Any) -> None:
        """A file beside the weights may say how far training was; one of settings says how far it is to go."""
        if not isinstance(obj, dict) or foreign(caller().file):
            return
        progress = [k for k in _progress(obj) if operator.index(obj[k]) > 0 and not k.endswith("s")]
        name = getattr(source, "name", None)
        if progress:
            path = str(Path(name).absolute()) if isinstance(name, str) else ""
            self.recorder.write(Load(path, progress, False, "json"))

    def optimizer_loaded(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        self.recorder.write(LoadStateDict("optimizer", not has_state(optimizer)))

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


def _progress(entries: dict[Any, Any]) -> list[str]:
    """The entries that say how far training was."""
    named = [(k, v) for k, v in entries.items() if isinstance(k, str)]
    return [k for k, v in named if _PROGRESS.fullmatch(k) and _is_count(v)]


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
