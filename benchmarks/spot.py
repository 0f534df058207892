"""What spot checks of an exact run cost: steps with a check and steps without, in turns, on two ranks.

python benchmarks/spot.py [--recipe dit] [--world 2] [--tiles 1] [--steps 20] [flags of lockstep train]

On a CPU steps are compared by the CPU time of a rank, which other work on the machine hardly changes, on a GPU by wall
time. The exit status is 1 if the checks of the default interval take 1 % or more.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from lockstep.config import Hardware
from lockstep.distributed import World, session
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer

CLAIM = 0.01


def timed(run: Trainer) -> float:
    """Seconds of one step."""
    on_gpu = run.world.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    run.train_step()
    run.progress.step += 1
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started


def measure(world: World, recipe: str, flags: list[str], steps: int) -> tuple[float, float]:
    """Return the median seconds of a step with a check and of one without."""
    folder = world.broadcast(tempfile.mkdtemp(prefix="lockstep-spot-") if world.is_main else None)
    request = parse(find(recipe), [*flags, "--exact", "--spot_check_every", "2", "--out", folder], "spot")
    run = Trainer(request, world, resolve_run_dir(request.train.run, recipe, world))
    run.model.train()
    times = [timed(run) for _ in range(4 + 2 * steps)][4:]
    run.step.close()
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    return statistics.median(times[::2]), statistics.median(times[1::2])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--recipe", default="dit")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=1, help="tiles of each rank in a step")
    parser.add_argument("--steps", type=int, default=20, help="steps with a check, and as many without")
    asked, flags = parser.parse_known_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={asked.world}"]
        done = subprocess.run([*command, __file__, *sys.argv[1:]], check=False, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="")
        return done.returncode or int(json.loads(done.stdout.splitlines()[-1])["share"] >= CLAIM)
    tile = parse(find(asked.recipe), flags, "spot").train.data.batch_size
    flags += ["--global_batch_size", str(tile * asked.tiles * asked.world)]
    with session("cpu" if "cpu" in flags else "auto") as world:
        checked, plain = measure(world, asked.recipe, flags, asked.steps)
        gc.collect()
        every = Hardware.spot_check_every
        share = (checked - plain) / (every * plain)
        if world.is_main:
            tiles = (checked - plain) / plain * asked.tiles
            step = f"{asked.recipe}, {asked.tiles} tile(s) per rank: a step takes {1000 * plain:.1f} ms"
            print(f"{step}, a check as long as {tiles:.2f} tiles; every {every} steps that is {100 * share:.2f} %")
            print(json.dumps({"device": str(world.device), "step": plain, "checked": checked, "share": share}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
