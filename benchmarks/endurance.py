"""Many checkpoints rotated in one process, and many runs started at once: nothing grows, nothing collides.

python benchmarks/endurance.py [--checkpoints 10000] [--runs 50] [--folder /dev/shm]

Memory, open files, threads and disk are compared between the end of the first tenth of the checkpoints and the end of
all. The runs train the recipe below, each in a process of its own and without --out: they must end in folders of their
own with the same weights and leave no lock and no temporary file. The exit status is 1 if something grows or collides.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from lockstep import Loss, Recipe, Rng
from lockstep.checkpoint import Checkpoints, newest

MEMORY_MB = 8.0
"""Growth that counts as none: the allocator's own, and once 4 MB when Python's table of interned strings is resized."""


class Line(Recipe):
    """Fit a line: as little as a run can be."""

    name = "line"
    defaults = {"n_steps": 20, "batch_size": 8, "save_every": 5, "tensorboard": False, "curves": False}

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> list[Tensor] | None:
        return [torch.tensor([float(i)]) for i in range(64)] if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor, rng: Rng) -> Loss:
        return Loss((model(batch / 64) - batch / 32).square().sum(), len(batch))


@dataclass(frozen=True)
class Usage:
    """What a process holds, and a folder."""

    memory_mb: float
    open_files: int
    threads: int
    files: int
    disk_mb: float

    @classmethod
    def now(cls, folder: Path) -> "Usage":
        process = psutil.Process()
        sizes = [path.lstat().st_size for path in folder.rglob("*")]
        memory = process.memory_info().rss / 2**20
        return cls(memory, process.num_fds(), settled_threads(process), len(sizes), sum(sizes) / 2**20)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.6g}" for name, value in asdict(self).items())

    def grown_since(self, before: "Usage") -> list[str]:
        """Return the names of what has grown."""
        allowed = {"memory_mb": MEMORY_MB, "disk_mb": 0.01}  # steps have more digits later
        old, new = asdict(before), asdict(self)
        return [name for name in old if new[name] > old[name] + allowed.get(name, 0)]


def settled_threads(process: psutil.Process) -> int:
    """Return the fewest threads seen in half a second: one that was joined needs a time slice of its own to be gone."""
    counts = []
    for _ in range(50):
        counts.append(process.num_threads())
        time.sleep(0.01)
    return min(counts)


def rotate(number: int, folder: Path) -> bool:
    """Save and rotate checkpoints; print what the process holds meanwhile, and return whether nothing has grown."""
    checkpoints = Checkpoints(folder, keep=3)
    tensors = {stem: {"weight": torch.randn(128, 64)} for stem in ("model", "optimizer")}
    usages, started = [], time.perf_counter()
    for step in range(1, number + 1):
        best = step % max(2, number // 20) == 1  # always as long before a measurement: it is kept as one more
        checkpoints.save(step, tensors, {"step": step}, best=best)
        if step in (number // 10, number // 2, number):
            checkpoints.wait()
            usages.append(Usage.now(folder))
            print(f"after {step:,} checkpoints: {usages[-1]}", flush=True)
        if failure := checkpoints.failure():
            raise RuntimeError(failure)
    found = newest(folder, print)
    assert found is not None and found.step == number
    seconds, grown = (time.perf_counter() - started) / number, usages[-1].grown_since(usages[0])
    print(f"a checkpoint: {1000 * seconds:.1f} ms; grown: {', '.join(grown) or 'nothing'}")
    return not grown


def start_at_once(number: int, folder: Path) -> bool:
    """Start runs at the same moment; print how they ended, and return whether none was in the way of another."""
    command = [sys.executable, "-m", "lockstep", "train", f"{Path(__file__).resolve()}:Line", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    started, logs = time.perf_counter(), [(folder / f"log-{n}").open("w") for n in range(number)]
    runs = [subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log) for log in logs]
    failed = sum(run.wait() != 0 for run in runs)
    seconds = time.perf_counter() - started
    for log in logs:
        log.close()
    weights = [path.read_bytes() for path in folder.glob("runs/line/*/checkpoints/last/model.safetensors")]
    left = list(folder.rglob(".*"))
    print(
        f"{number} runs at once: {number - failed} complete in {len(weights)} folders with {len(set(weights))} kind(s) "
        f"of weights, {len(left)} file(s) left behind, {seconds:.1f} s"
    )
    return not failed and len(weights) == number and len(set(weights)) == 1 and not left


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--folder", help="where to write; by default the folder for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-endurance-", dir=options.folder) as name:
        folder = Path(name)
        good = rotate(options.checkpoints, folder / "rotated" / "checkpoints") if options.checkpoints else True
        return int(not (start_at_once(options.runs, folder) if options.runs else True) or not good)


if __name__ == "__main__":
    sys.exit(main())
