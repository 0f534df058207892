"""What being watched costs: the audit's probes, and the checks inside every run, as shares of a step of `dit`.

python benchmarks/watching.py [flags of `lockstep train dit`]      # exit status 1 if it is more than we claim

In each of a few processes steps that the probes see and steps that are hidden from them alternate, and are compared by
the processor time they use, which other work on the machine hardly disturbs; in one thread, since threads that wait for
each other use it too. On a GPU, where the processor waits, by the clock. The probes look most closely at the first
steps, so it is the first twenty that count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.audit import probes
from lockstep.audit.trace import Recorder
from lockstep.distributed import World, pick_device
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer

ROUNDS, STEPS = 5, 20
AUDIT, WATCH = 0.05, 0.005
"""The shares of a step's time that we claim they stay below."""


def main(flags: list[str]) -> int:
    rounds = [measure(flags) for _ in range(ROUNDS)]
    step, audit, check = (statistics.median(r[name] for r in rounds) for name in ("step", "audit", "check"))
    print(f"a step of dit: {1000 * step:.1f} ms")
    print(f"the audit's probes: {100 * audit:.2f} % of a step (claimed: below {100 * AUDIT:g} %)")
    print(f"the checks of every run: {100 * check:.3f} % (claimed: below {100 * WATCH:g} %)")
    return int(audit >= AUDIT or check >= WATCH)


def measure(flags: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--once", *flags]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def once(flags: list[str]) -> dict[str, float]:
    """Seconds of a step; what probes add to it; the run's own checks, spread over the steps between two of them."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0)
        probes.install(recorder)
        words = flags or ["--preset", "laptop", "--device", "cpu"]
        request = parse(find("dit"), [*words, "--out", f"{folder}/run", "--no_tensorboard"], "watching")
        world = World(device=pick_device(request.train.hardware.device, 0))
        run = Trainer(request, world, resolve_run_dir(request.train.run, "dit", world))
        run.model.train()
        clock = timer(world.device)
        with recorder.hide():
            run.train_step()
        hidden = seen = 0.0
        for _ in range(STEPS):
            with recorder.hide():
                hidden += elapsed(clock, run.train_step)
            seen += elapsed(clock, run.train_step)
        checks = [elapsed(clock, lambda: run.watch.check(run.progress.step, [])) for _ in range(20)]
        step = hidden / STEPS
        check = statistics.median(checks) / request.train.run.log_every
        return {"step": step, "audit": seen / hidden - 1, "check": check / step}


def timer(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def elapsed(clock: Callable[[], float], act: Callable[[], object]) -> float:
    start = clock()
    act()
    return clock() - start


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(once(sys.argv[2:])))
    else:
        sys.exit(main(sys.argv[1:]))
