"""Run the examples of loops of one's own inside a test: in float64, in a folder of the test's."""

import contextlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from processes import ROOT
from torch import Tensor

import lockstep
from lockstep import checkpoint

NAMES = ("classifier", "gan", "language_model", "self_supervised")
FOLDER = ROOT / "examples" / "loops"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(world: lockstep.World, name: str, folder: str) -> list[str]:
    """What an example prints or returns; its run is in folder/runs/name. The default dtype is put back."""
    printed: list[str] = []
    dtype, world.print = torch.get_default_dtype(), lambda *values: printed.append(" ".join(map(str, values)))  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.chdir(folder):
            if (value := example(name).main(world)) is not None:
                printed.append(repr(round(value, 9)))
    finally:
        torch.set_default_dtype(dtype)
        world.closing.close()
        del world.print  # type: ignore[method-assign]
    return printed


def final_state(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of the last checkpoint, and the rest."""
    saved = checkpoint.newest(folder / "runs" / name / "checkpoints", print)
    assert saved is not None
    tensors = {f"{part}/{key}": tensor for part, group in saved.tensors.items() for key, tensor in group.items()}
    return tensors, saved.state | {"step": saved.step}


def main() -> None:
    """`python loops.py NAME STEP`: run an example, and kill the last rank when that step is done."""
    import signal
    import sys

    name, step, end_step = sys.argv[1], int(sys.argv[2]), lockstep.Run.end_step

    def killed(run: lockstep.Run, at_end: bool = False) -> None:
        end_step(run, at_end)
        if run.step == step and run.world.rank == run.world.size - 1:
            if run.checkpoints is not None:
                run.checkpoints.wait()  # a slow disk may not have got the first one yet
            os.kill(os.getpid(), signal.SIGKILL)

    lockstep.Run.end_step = killed  # type: ignore[method-assign]
    with lockstep.world(device="cpu") as world:
        run_example(world, name, ".")


if __name__ == "__main__":
    main()
