"""Weights from files: read without unpickling anything but tensors, checked against the model they are for.

weights = read_weights(Path("resnet50.pth"))
copy_weights(model, weights, "resnet50.pth", skip=("fc.",))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

ENDINGS = (".safetensors", ".pth", ".pt")
_SHOWN = 3
"""Tensors of each kind that an error names."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, .pth or .pt file by name.

    The state dict may lie under "state_dict" or "model", and its names may begin with DDP's `module.`.
    """
    if path.suffix not in ENDINGS:
        raise ValueError(f"weights are read from {', '.join(ENDINGS)} files, not from {path.name!r}")
    if not path.is_file():
        raise ValueError(f"there is no file {path} to read weights from")
    try:
        content: Any = (
            safetensors.torch.load(path.read_bytes())
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:  # damaged files and pickled objects raise many kinds
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read: it is damaged, or holds more than tensors ({reason})") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ValueError(f"{path} holds no dict of tensors; save `model.state_dict()`")
    for name, tensor in content.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            bad = (~torch.isfinite(tensor.float())).nonzero()
            raise ValueError(
                f"{path} holds {len(bad)} values that are not finite in {name}, first at {tuple(bad[0].tolist())}; "
                "give weights of a training that did not diverge"
            )
    prefix = "module." if all(str(name).startswith("module.") for name in content) else ""
    return {str(name).removeprefix(prefix): tensor.detach() for name, tensor in content.items()}


def check_shapes(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    source: str,
    remedy: str = "Use the settings that it was trained with.",
) -> None:
    """Raise a ValueError unless `found`, read from `source`, has the names and shapes of `expected`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    other = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wrong = {
        "missing": [f"{name} {shape}" for name, shape in shapes.items() if name not in other],
        "unexpected": [f"{name} {shape}" for name, shape in other.items() if name not in shapes],
        "of another shape": [
            f"{name} {other[name]}, here {shape}" for name, shape in shapes.items() if other.get(name, shape) != shape
        ],
    }
    parts = [
        f"{len(names)} {kind} ({'; '.join(names[:_SHOWN] + ['...'] * (len(names) > _SHOWN))})"
        for kind, names in wrong.items()
        if names
    ]
    if parts:
        raise ValueError(f"{source} is of another model: {', '.join(parts)}. {remedy}")


def copy_weights(
    module: nn.Module, weights: Mapping[str, Tensor], source: str, remedy: str, skip: tuple[str, ...] = ()
) -> int:
    """Copy pretrained weights into a module, but for names that begin with one of `skip`; how many were copied.

    BatchNorm's counters may be missing: files from before torch 0.4.1 have none.
    """
    found = {name: tensor for name, tensor in weights.items() if not name.startswith(skip)}
    expected = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if not name.startswith(skip) and (name in found or not name.endswith("num_batches_tracked"))
    }
    check_shapes(expected, found, source, remedy)
    module.load_state_dict(found, strict=False)
    return len(found)
