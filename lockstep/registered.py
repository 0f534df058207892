"""What a loop of one's own registers: any objects with `state_dict` and `load_state_dict`, kept equal and saved."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import batchnorm, nested
from .checkpoint import Checkpoint, Tensors
from .distributed import World
from .parallel import is_wrapped, make_equal
from .state import Stateful
from .weights import check_shapes


class Registered:
    """Objects by name: each is a file of the checkpoint for its tensors, and a key of state.json for the rest."""

    def __init__(self, objects: Mapping[str, Any], world: World):
        self.objects: dict[str, Stateful] = {}
        for name, given in objects.items():
            found = getattr(given, "_orig_mod", given)  # what torch.compile has wrapped
            if not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
                raise ValueError(
                    f"{name} is a {type(found).__name__}, which has no state_dict() and load_state_dict(); what is "
                    "registered with a Run is saved by them"
                )
            if isinstance(found, nn.Module) and is_wrapped(found):
                raise ValueError(f"{name} is wrapped in DDP: register the plain model, run.backward() sums gradients")
            self.objects[name] = found
        self._check_optimizers()
        for model in self.models.values() if world.size > 1 else ():
            batchnorm.replace_batch_norm(model, partial(batchnorm.SyncBatchNorm, activity=world.activity))
            make_equal(model, world)

    def _check_optimizers(self) -> None:
        """Refuse optimizers of parameters that are in no registered model: no gradients of theirs would be summed."""
        own = set(self.parameters())
        for name, found in self.objects.items():
            groups = found.param_groups if isinstance(found, torch.optim.Optimizer) else []
            foreign = [parameter for group in groups for parameter in group["params"] if parameter not in own]
            if foreign:
                raise ValueError(
                    f"{name} trains {len(foreign)} parameter(s) that are in no registered model, first of shape "
                    f"{tuple(foreign[0].shape)}; register their module too, so that their gradients are summed"
                )

    @property
    def models(self) -> dict[str, nn.Module]:
        return {name: found for name, found in self.objects.items() if isinstance(found, nn.Module)}

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for model in self.models.values() for parameter in model.parameters())

    def has_batch_norm(self) -> bool:
        return any(batchnorm.has_batch_norm(model) for model in self.models.values())

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and the rest of every object, by its name."""
        tensors, outlines = Tensors(), dict[str, Any]()
        for name, found in self.objects.items():
            try:
                tensors[name], outlines[name] = nested.split(found.state_dict())
            except ValueError as error:
                raise ValueError(f"{name} cannot be saved: {error}") from None
        return {name: group for name, group in tensors.items() if group}, outlines

    def replicated(self, everything: bool) -> dict[str, Tensor]:
        """Return, by "<object>/<name>", the tensors that must be equal on every rank; or of them only the models'."""
        chosen = self.objects if everything else self.models
        split = {name: nested.split(found.state_dict())[0] for name, found in chosen.items()}
        return {f"{name}/{path}": tensor for name, tensors in split.items() for path, tensor in tensors.items()}

    def restore(self, saved: Checkpoint) -> None:
        """Load every object from a checkpoint, which must have the same ones."""
        outlines = saved.state["objects"]
        if outlines.keys() != self.objects.keys():
            there, here = (", ".join(names) or "nothing" for names in (outlines, self.objects))
            raise ValueError(f"{saved.path} holds {there}, but {here} is registered; register what its run registered")
        for name, found in self.objects.items():
            tensors = saved.tensors.get(name, {})
            if isinstance(found, nn.Module):
                check_shapes(nested.split(found.state_dict())[0], tensors, f"{name} of {saved.path}")
            found.load_state_dict(nested.join(tensors, outlines[name]))


def numbers(outline: Any, path: str) -> dict[str, Any]:
    """Return the leaves of a state without tensors by their paths: what is compared over the ranks."""
    if not isinstance(outline, dict | list):
        return {path: outline}
    pairs = list(outline.items() if isinstance(outline, dict) else enumerate(outline))
    if isinstance(outline, dict) and "$tensor" in outline:
        return {}
    return {name: leaf for key, value in pairs for name, leaf in numbers(value, f"{path}.{key}").items()}
