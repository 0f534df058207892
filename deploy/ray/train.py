"""Train with Ray: its TorchTrainer starts the workers, and each of them is one rank of a Lockstep run.

    python deploy/ray/train.py dit 8 --global_batch_size 1024 --out /shared/runs/mine     8 workers with a GPU each
    python deploy/ray/train.py dit 2 --device cpu --preset laptop                         2 workers on CPUs

Ray places and replaces the workers. The engine, its checkpoints and its checks are those of `lockstep train`: a worker
that fails ends the attempt, and the next one continues from the last checkpoint (`--resume auto`), on the workers that
there are.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_loop(settings: dict[str, Any]) -> None:
    """Run one rank; Ray has set RANK, WORLD_SIZE, LOCAL_RANK and where the ranks meet."""
    import torch.distributed as dist

    from lockstep import api, flags, registry, rundir

    dist.destroy_process_group()  # Ray's own; the run makes one with its time-outs
    os.environ["MASTER_PORT"] = str(settings["port"])
    os.chdir(settings["folder"])
    recipe = registry.find(settings["recipe"])
    request = flags.parse(recipe, settings["words"], "train.py", rundir.find_config)
    outcome = api.fit(recipe, request.train)
    if os.environ["RANK"] == "0":
        ray.train.report({"step": outcome.step, **outcome.metrics})
    else:
        ray.train.report({})


def main() -> None:
    recipe, workers, *words = sys.argv[1:]
    on_gpu = "cpu" not in words
    settings = {
        "recipe": recipe,
        "words": [*words, *([] if "--resume" in words else ["--resume", "auto"])],
        "folder": str(Path.cwd()),
        "port": os.environ.get("LOCKSTEP_PORT", "29531"),
    }
    TorchTrainer(
        train_loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=on_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
