"""Draw how far one rank and several part over the steps of a run, with and without --exact.

python benchmarks/exact_picture.py [--recipe dit] [--worlds 1,4] [--steps 200] [--out exact.png] [flags of train]

Without --exact each rank puts its whole share through the model at once, as users do.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lockstep.checkpoint import load
from lockstep.commands.verify import weight_difference

BATCH = 16


def train(recipe: str, world: int, exact: bool, steps: int, flags: list[str], folder: Path) -> dict[int, Path]:
    """The checkpoints of a run, by step."""
    every = str(max(1, steps // 20))
    own = ["--n_steps", str(steps), "--save_every", every, "--keep", "1000", "--sample_every", "0", "--no_curves"]
    own += ["--precision", "bf16", "--no_tensorboard", "--global_batch_size", str(BATCH)]
    own += ["--exact", "--batch_size", "4"] if exact else ["--batch_size", str(BATCH // world)]
    words = ["train", recipe, "--nproc", str(world), "--out", str(folder), *own, *flags]
    subprocess.run([sys.executable, "-m", "lockstep", *words], check=True)
    return {int(path.name[5:]): path for path in sorted((folder / "checkpoints").glob("step-*"))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="dit")
    parser.add_argument("--worlds", default="1,4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="exact.png")
    asked, flags = parser.parse_known_args()
    worlds = [int(world) for world in asked.worlds.split(",")]
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would cut the batch, by the world
    figure, axes = plt.subplots(figsize=(7, 3.6))
    with tempfile.TemporaryDirectory() as parent:
        for exact, colour in ((False, "#d1495b"), (True, "#00798c")):
            first, other = (
                train(asked.recipe, world, exact, asked.steps, flags, Path(parent) / f"{exact}-{world}")
                for world in worlds
            )
            steps = sorted(first.keys() & other.keys())
            apart = [weight_difference(load(first[n]).tensors["model"], load(other[n]).tensors["model"]) for n in steps]
            axes.plot(steps, apart, "o-", markersize=3, color=colour, label="--exact" if exact else "without")
            print(f"{'exact' if exact else 'plain'}: max weight difference after {steps[-1]} steps: {apart[-1]:.2g}")
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_xlabel("step")
    axes.set_ylabel("max weight difference")
    axes.set_title(f"{asked.recipe} in bf16 on {worlds[0]} and on {worlds[1]} ranks")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(asked.out, dpi=120)


if __name__ == "__main__":
    main()
