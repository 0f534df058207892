"""The cost of the audit's probes and of the checks inside every run, as shares of a step of `dit`.

python benchmarks/watching.py [--rounds 5] [--steps 20] [flags of `lockstep train dit`]

Each round is a process in which steps that the probes record and steps that are hidden from them alternate. On a CPU
they are compared by CPU time, which other work on the machine hardly changes, in one thread, since threads that wait
for each other use CPU time too; on a GPU by wall time. The probes record most in the first steps: the first twenty
count. The exit status is 1 if a share is above the claim.
"""

import argparse
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
from lockstep.audit.recorder import Recorder
from lockstep.distributed import World, pick_device
from lockstep.flags import parse
from lockstep.registry import find
from lockstep.rundir import resolve_run_dir
from lockstep.trainer import Trainer

AUDIT, WATCH = 0.05, 0.005
"""The claim: shares of the time of a step that they stay below."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="processes to take the median of")
    parser.add_argument("--steps", type=int, default=20, help="steps with probes and steps without, in each process")
    parser.add_argument("--once", action="store_true", help="run one round in this process and print it as JSON")
    options, flags = parser.parse_known_args(arguments)
    if options.once:
        print(json.dumps(once(options.steps, flags)))
        return 0
    rounds = [measure(options.steps, flags) for _ in range(options.rounds)]
    step, audit, check = (statistics.median(r[name] for r in rounds) for name in ("step", "audit", "check"))
    print(f"a step of dit: {1000 * step:.1f} ms")
    print(f"the audit's probes: {100 * audit:.2f} % of a step (claimed: below {100 * AUDIT:g} %)")
    print(f"the checks of every run: {100 * check:.3f} % (claimed: below {100 * WATCH:g} %)")
    return int(audit >= AUDIT or check >= WATCH)


def measure(steps: int, flags: list[str]) -> dict[str, float]:
    """Return the result of one round in a process of its own."""
    command = [sys.executable, __file__, "--once", "--steps", str(steps), *flags]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def once(steps: int, flags: list[str]) -> dict[str, float]:
    """Return the seconds of a step, and as shares of it what the probes and the checks of the run add per step."""
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
        hidden = recorded = 0.0
        for _ in range(steps):
            with recorder.hide():
                hidden += elapsed(clock, run.train_step)
            recorded += elapsed(clock, run.train_step)
        checks = [elapsed(clock, lambda: run.watch.check(run.progress.step, [])) for _ in range(20)]
        step = hidden / steps
        check = statistics.median(checks) / request.train.run.log_every
        return {"step": step, "audit": recorded / hidden - 1, "check": check / step}


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
    sys.exit(main(sys.argv[1:]))
