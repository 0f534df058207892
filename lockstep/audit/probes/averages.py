"""Averages of the weights (EMA): when they are updated, and who reads them."""

import copy
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..events import AverageChanged, AverageRead
from ..source import Site, caller, foreign, user_line
from .context import Context, never_raises, should_sample

_OF_TORCH = ("torch/optim/swa_utils.py", "torch/nn/modules/module.py", "torch/utils/_contextlib.py")
"""Files of torch that read an average to update it, when the script calls them."""
_SMALL = 1 << 16
"""Numbers of the tensor by which a change of a model is noticed, if it has one that small."""


def install(context: Context) -> None:
    probe = Averages(context)
    context.watch(copy, "deepcopy", before=probe.copied, after=probe.created)
    context.watch(AveragedModel, "__init__", after=lambda _, model, *__, **___: probe.created(model))
    context.watch(nn.Module, "load_state_dict", after=lambda _, model, *__, **___: probe.created(model))
    for name in ("named_parameters", "named_buffers", "state_dict"):
        context.watch(nn.Module, name, before=lambda module, *_, **__: probe.read(module, False))
    context.watch(torch, "save", before=probe.saved)
    context.on_backward.append(probe.before_backward)
    context.on_step.append(probe.after_step)


class Averages:
    """State of the probes of one rank's models that may be averages of another."""

    def __init__(self, context: Context):
        self.context, self.recorder = context, context.recorder
        self.models: list[ref[nn.Module]] = []
        self.numbers: dict[int, int] = {}  # of models and what they wrap, by id
        self.learning: set[int] = set()
        self.values: dict[int, int] = {}  # checksums of a tensor, by number
        self.reads: set[tuple[int, Site | None, bool]] = set()  # since the last step
        self.backwards = 0  # since the last step

    def created(self, model: Any, *_: Any, **__: Any) -> None:
        """A copy of a model may become an average of it: one that changes, and that no optimizer has."""
        known = self.models[self.numbers[id(model)]]() if id(model) in self.numbers else None
        if known is not None or not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
            return
        number = len(self.models)
        self.models.append(ref(model))
        parts = [model, model.module] if isinstance(model, AveragedModel) else [model]
        self.numbers |= {id(part): number for part in parts}
        self.context.before_forward(model, lambda module, *_: self.forward(module))

    def forward(self, model: nn.Module) -> None:
        """What is called with gradients, by which it learns, is no average."""
        if not self.context.hidden and torch.is_grad_enabled() and model.training:
            learns = any(p.requires_grad for p in model.parameters())
            self.learning |= {self.numbers[id(model)]} if learns and id(model) in self.numbers else set()
        self.read(model, True)

    def copied(self, model: Any, *_: Any, **__: Any) -> None:
        if isinstance(model, nn.Module):
            self.read(model, True)

    def saved(self, obj: Any, *_: Any, **__: Any) -> None:
        for part in (obj, *(obj.values() if isinstance(obj, dict) else ())):
            if isinstance(part, nn.Module):
                self.read(part, True)

    def read(self, model: nn.Module, is_use: bool) -> None:
        """Record who reads the weights, once for each step: an update reads them, too."""
        if self.context.hidden or not self.context.steps:
            return
        number = self.numbers.get(id(model))
        if number is None or self.models[number]() is None:
            return
        line = caller(*_OF_TORCH)
        key = number, user_line(), is_use or foreign(line.file)  # a library may do anything with them
        if key not in self.reads:
            self.reads.add(key)
            self.recorder.write(AverageRead(number, key[2], at=key[1]))

    @never_raises
    def before_backward(self) -> None:
        """Record which models have changed since the last backward pass, without an optimizer."""
        self.backwards += 1
        if not self.models or not should_sample(self.context.steps + 1):
            return
        with self.recorder.hide():
            optimized = {id(p) for watched in self.context.optimizers for p in watched.parameters}
            for number, reference in enumerate(self.models):
                tensors = list(model.parameters()) if (model := reference()) is not None else []
                if not tensors or number in self.learning or any(id(p) in optimized for p in tensors):
                    continue
                chosen = next((t for t in tensors if t.numel() <= _SMALL and t.dim() > 1), tensors[0])
                value = self.context.checksums({"": chosen}).get("", 0)
                if self.values.setdefault(number, value) != value:
                    self.recorder.write(AverageChanged(number, self.backwards > 1))
                self.values[number] = value

    def after_step(self) -> None:
        self.backwards = 0
        self.reads.clear()
