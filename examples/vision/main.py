"""Image classification and segmentation: main.py --config configs/ddp_example.yaml --task train | test | predict.

Start it with python, torchrun or run_ddp.sh. test and predict use the run of --resume or --out, or the newest one;
predict reads --input: an image, a folder (images/ by default) or a file of IDX images. All other flags are those of
`lockstep train vision`.
"""

import argparse
import sys
from pathlib import Path

from lockstep import train
from lockstep.cli import exit_with
from lockstep.commands import predict, test
from lockstep.flags import Request, parse
from lockstep.registry import find
from lockstep.rundir import RUNS, newest_run

VisionRecipe = find("vision")


def trained(request: Request) -> Path:
    """Return the folder of the run to use."""
    named = request.train.run.resume or request.train.run.out
    path = newest_run(RUNS / VisionRecipe.name) if named in (None, "auto", "latest") else Path(named)
    if path is None or not path.exists():
        raise ValueError(f"there is no run {path or f'in {RUNS / VisionRecipe.name}'} yet; train first: --task train")
    return path


def run(task: str, source: str, flags: list[str]) -> int:
    """Test or predict with a trained model; all ranks that torchrun started share the work."""
    request = parse(VisionRecipe, flags, "main.py")
    path, hardware = trained(request), request.train.hardware
    # The best by its validation metric, where there is one.
    best = "best" if (path / "checkpoints" / "best").exists() else "last"
    words = ["--checkpoint", best, "--nproc", hardware.nproc, "--device", hardware.device]
    if task == "test":
        return test.run([str(path), *words])
    return predict.run([str(path), source, *words])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", choices=["train", "test", "predict"], default="train")
    parser.add_argument("--input", default="images")
    known, flags = parser.parse_known_args()
    if known.task == "train":
        sys.argv[1:] = flags
        train(VisionRecipe)
    exit_with(lambda: run(known.task, known.input, flags))
