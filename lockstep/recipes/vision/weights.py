"""Pretrained weights into a model: torchvision's, timm's, or those of a run (model.pth, model.safetensors)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .model import HEADS

_NAMED = 4
"""How many tensors an error names."""


def load_pretrained(model: nn.Module, path: str) -> str:
    """Copy every tensor but a head of other classes; a line that says what was taken."""
    found, own = _read(Path(path).expanduser()), model.state_dict()
    head = next(name for name in HEADS if f"{name}.weight" in own)
    classes = found.get(f"{head}.bias"), own[f"{head}.bias"]
    heads = {name for name in own if name.startswith(f"{head}.")}
    other_classes = classes[0] is None or classes[0].shape != classes[1].shape
    skipped = heads if other_classes else set[str]()
    _match(
        {name: tensor for name, tensor in own.items() if name not in skipped},
        {name: tensor for name, tensor in found.items() if not (other_classes and name.startswith(f"{head}."))},
        path,
    )
    taken = {name: tensor for name, tensor in found.items() if name in own and name not in skipped}
    model.load_state_dict(taken, strict=False)
    there = "no" if classes[0] is None else f"{len(classes[0])}"
    note = f"; the head {head} is new ({there} classes there, {len(classes[1])} here)" if other_classes else ""
    return f"pretrained: {len(taken)} tensors from {path}{note}"


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"pretrained is a file of weights, {path} is {'a folder' if path.exists() else 'not there'}")
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the safe unpickler meets bytes that mean nothing with all kinds of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} holds no weights that can be read safely ({reason}); save a state_dict") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state_dict (names and tensors); save one")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def _match(own: Mapping[str, Tensor], found: Mapping[str, Tensor], path: str) -> None:
    """Refuse weights of another network, with names and shapes."""
    counters = "num_batches_tracked"  # older files have none, and nothing depends on it
    wrong = {
        "of another shape": [
            f"{name} {tuple(found[name].shape)} there, {tuple(own[name].shape)} here"
            for name in own
            if name in found and found[name].shape != own[name].shape
        ],
        "missing there": [
            f"{name} {tuple(own[name].shape)}" for name in own if name not in found and not name.endswith(counters)
        ],
        "unknown here": [f"{name} {tuple(found[name].shape)}" for name in found if name not in own],
    }
    parts = [
        f"{what}: {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
        for what, names in wrong.items()
        if names
    ]
    if parts:
        raise ValueError(
            f"{path} does not fit this model ({'; '.join(parts)}); give the --model, --stem, --width and --img_size "
            "that it was trained with"
        )
