"""Checkpoints written and read, values logged, settings in the environment."""

import builtins
import operator
import os
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..patch import Function, Patches
from ..trace import site
from .context import Context, careful

_PROGRESS = re.compile(
    r"(?!num_|max_|total_|n_|warmup_|.*_per_)(.+_)?(epoch|step|iter(ation)?)s?(_(run|num|idx|count|done))?"
    r"|globalstep|num_updates|n_iter|consumed_samples|tokens_seen",
    re.IGNORECASE,
)
"""Names under which a checkpoint says how far training was."""


def install(context: Context, patches: Patches) -> None:
    probe = Files(context)
    patches.wrap(torch, "save", probe.save)
    patches.wrap(torch, "load", probe.load)
    for owner, name in ((os, "replace"), (os, "rename"), (shutil, "move")):
        patches.wrap(owner, name, probe.move)
    patches.wrap(nn.Module, "load_state_dict", lambda original: probe.restore("model", original))
    patches.wrap(Optimizer, "load_state_dict", lambda original: probe.restore("optimizer", original))
    patches.wrap(builtins, "print", probe.print)
    patches.when_imported("torch.utils.tensorboard.writer", lambda module: probe.tensorboard(module, patches))
    probe.environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # which the audit sets
    patches.wrap(type(os.environ), "__setitem__", probe.setting)


class Files:
    """State of the probes of what one rank writes and reads."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.environment: dict[str, str] = {}

    def save(self, original: Function) -> Function:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.context.hidden and isinstance(f, (str, os.PathLike)):
                self._saved(obj, Path(f).absolute())
            with self.recorder.hide():
                return original(obj, f, *args, **kwargs)

        return save

    @careful
    def _saved(self, obj: Any, path: Path) -> None:
        seen = {"path": str(path), "existed": path.exists(), "keys": _keys(obj)[:5], **_contents(obj)}
        self.recorder.write("save", **seen)

    def load(self, original: Function) -> Function:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.hide():
                result = original(f, *args, **kwargs)
            if not self.context.hidden and isinstance(f, (str, os.PathLike)):
                self._loaded(result, Path(f).absolute())
            return result

        return load

    @careful
    def _loaded(self, obj: Any, path: Path) -> None:
        entries = obj.items() if isinstance(obj, dict) else ()
        progress = [k for k, v in entries if isinstance(k, str) and _PROGRESS.fullmatch(k) and _is_count(v)]
        self.recorder.write("load", path=str(path), progress=progress, **_contents(obj))

    def move(self, original: Function) -> Function:
        def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.context.recorder.is_hidden and (at := site()) is not None:
                source, path = (str(Path(os.fsdecode(p)).absolute()) for p in (src, dst))
                self.recorder.write("move", at, source=source, path=path)
            return original(src, dst, *args, **kwargs)

        return move

    def restore(self, what: str, original: Function) -> Function:
        def load_state_dict(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.context.hidden:
                self.recorder.write("restore", what=what)
            with self.recorder.hide():
                return original(owner, *args, **kwargs)

        return load_state_dict

    def print(self, original: Function) -> Function:
        def print(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("file") is None and not self.context.recorder.in_worker and not self.context.hidden:
                self.context.prints += 1
                if self.context.prints == 1:
                    self.recorder.write("print")
            original(*args, **kwargs)

        return print

    def tensorboard(self, module: ModuleType, patches: Patches) -> None:
        def watched(original: Function) -> Function:
            def add_scalar(writer: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> Any:
                self._logged(writer, tag, scalar_value, kwargs.get("global_step", args[0] if args else None))
                return original(writer, tag, scalar_value, *args, **kwargs)

            return add_scalar

        patches.wrap(module.SummaryWriter, "add_scalar", watched)

    @careful
    def _logged(self, writer: Any, tag: str, value: Any, step: Any) -> None:
        with self.recorder.hide():
            self.recorder.write("scalar", tag=tag, value=float(value), step=step, folder=writer.get_logdir())

    def setting(self, original: Function) -> Function:
        def __setitem__(environment: Any, name: str, value: str) -> None:
            if not self.context.recorder.is_hidden and environment is os.environ and (at := site()) is not None:
                before = self.environment.get(name)
                self.recorder.write("setting", at, name=name, value=value, before=before)
            original(environment, name, value)

        return __setitem__


def _is_count(value: Any) -> bool:
    try:
        return operator.index(value) >= 0 and not isinstance(value, bool)
    except (TypeError, RuntimeError):
        return False


def _contents(obj: Any) -> dict[str, Any]:
    """Whether a checkpoint holds an optimizer's state, and weights with the prefix of a wrapper."""
    if not isinstance(obj, dict):
        return {"optimizer": False, "prefixed": False}
    states = [v for v in obj.values() if isinstance(v, dict)]
    return {
        "optimizer": any({"state", "param_groups"} <= set(s) for s in states),
        "prefixed": "n_averaged" not in obj and any(key.startswith("module.") for key in _keys(obj)),
    }


def _keys(obj: Any) -> list[str]:
    """Names of the weights in a checkpoint, at the top or one level down."""
    if not isinstance(obj, dict):
        return []
    weights = [obj, *(v for v in obj.values() if isinstance(v, dict))]
    return [str(k) for d in weights for k, v in d.items() if isinstance(v, torch.Tensor)]
