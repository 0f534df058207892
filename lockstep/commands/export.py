"""`lockstep export RUN --to hf|safetensors|dcp`: the weights of a run, for other programs.

hf              a folder for `from_pretrained`, written by the model's own `save_pretrained`
safetensors     one file with all tensors by their plain names
dcp             a folder of torch.distributed.checkpoint, with the tensors under "model"
"""

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import tyro
from torch import Tensor, nn

from .. import checkpoint, rundir
from ..distributed import World
from ..files import replacing
from ..options import ExportFlags, UseFlags
from .trained import choose_checkpoint, load_run, path_of


def run(words: list[str]) -> int:
    path = path_of(words, "export")
    flags = tyro.cli(ExportFlags, args=words[1:], prog="lockstep export RUN", use_underscores=True)
    folder = Path(flags.out) if flags.out else rundir.run_folder(path) / "export" / flags.to
    folder.mkdir(parents=True, exist_ok=True)
    if flags.to == "hf":
        use = UseFlags(weights="ema" if flags.ema else "plain", checkpoint=flags.checkpoint, recipe=flags.recipe)
        loaded = load_run(path, use, World())
        pretrained_part(loaded.model).save_pretrained(folder)
        step, name = loaded.saved.step, loaded.weights
    else:
        saved = checkpoint.load(choose_checkpoint(checkpoint.resolve(path), flags.checkpoint))
        step, name = saved.step, _group(saved, flags.ema)
        write = _write_safetensors if flags.to == "safetensors" else _write_dcp
        write(folder, saved.tensors[name], {"step": str(step), "weights": name})
    kind = "averaged" if name.startswith("ema") else "plain"
    print(f"{kind} weights of step {step}:\n{folder}")
    return 0


def _group(saved: checkpoint.Checkpoint, ema: bool) -> str:
    averages = [name for name in saved.tensors if name.startswith("ema-")]
    if ema and not averages:
        raise ValueError(f"{saved.path} has no averaged weights; leave out --ema")
    return averages[0] if ema else "model"


def _write_safetensors(folder: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    with replacing(folder / "model.safetensors") as temporary:
        safetensors.torch.save_file(tensors, temporary, {"format": "pt", **facts})


def _write_dcp(folder: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    import torch.distributed.checkpoint as dcp  # takes a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        dcp.save({"model": tensors, "facts": facts}, checkpoint_id=folder)


def pretrained_part(model: nn.Module) -> Any:
    """Return the part of a recipe's model that Hugging Face libraries can save: the model itself, or one module in it.

    A part of such a part does not count: it is saved with the whole.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer, _ in found)
        if hasattr(module, "save_pretrained") and not inside:
            found.append((name, module))
    if len(found) == 1:
        return found[0][1]
    names = ", ".join(name for name, _ in found)
    raise ValueError(
        f"the model has {len(found)} parts with save_pretrained()"
        + (f" ({names}); --to hf saves one" if found else ", which --to hf needs")
        + ": use --to safetensors"
    )
