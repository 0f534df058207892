"""Two recipes trained under random faults: every run must end by itself with the bits of the undisturbed run.

python benchmarks/chaos.py [--faults 1000] [--seed 0] [--state chaos.json] [--minutes 60] [--jobs 2]

Needs Linux, root (a small tmpfs for each run, network namespaces, chattr) and the folder tests/ beside this one, whose
prepared interpreters start runs quickly. Each run has two ranks and up to six faults, caused at a chosen call in a
chosen phase (faults/inject.py). After a launch that has failed the run is started again with `--resume auto`, or by the
agent (`--max_restarts`). At the end the tensors and numbers of the last checkpoint and the exported weights are
compared with those of a run without faults, to the bit; no process, lock, temporary file or mount may be left. Results
are added to the state file after each run; a second call goes on from there. The exit status is 1 if a run failed.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults.inject import BIT_FLIP, CUT_LINK, DAMAGED, FULL_DISK, IMMUTABLE, NAN, Fault
from faults.runs import CURVE, VISION, Recipe, Result, disturbed, undisturbed
from processes import zygote

FAULTS_PER_RUN = 6
KINDS = {
    "SIGKILL": 28, "SIGTERM": 12, "SIGHUP": 10, "SIGSTOP": 14, DAMAGED: 10, FULL_DISK: 8, IMMUTABLE: 8, NAN: 4,
    BIT_FLIP: 6,
}  # fmt: skip
PHASES = {"start-up": 20, "step": 28, "checkpoint": 24, "evaluation": 12, "sampling": 8, "export": 8}
LEFT_STOPPED = 0.25
"""Share of SIGSTOP without a SIGCONT: the hang watch must end these runs."""
_one_pair_of_hosts, _one_reference = threading.Lock(), threading.Lock()


def fault(draw: random.Random, recipe: Recipe, workers: bool) -> Fault:
    """Return a random fault that can happen in such a run."""
    kind = draw.choices([*KINDS], [*KINDS.values()])[0]
    phases = ["step"] if kind in (NAN, BIT_FLIP) else [*recipe.phases]
    phase = draw.choices(phases, [PHASES[name] for name in phases])[0]
    on_main = phase in ("checkpoint", "export") or kind in (FULL_DISK, IMMUTABLE, DAMAGED)
    rank = 0 if on_main else draw.randrange(2)
    target = {FULL_DISK: "disk", IMMUTABLE: "run folder", NAN: "batch", BIT_FLIP: f"rank {rank}", DAMAGED: "rank 0"}
    seconds = draw.uniform(0.05, 0.8) if draw.random() > LEFT_STOPPED else 0.0
    if kind not in target:
        choices = [f"rank {rank}", f"rank {rank}", "rank 0" if phase == "start-up" else "rank 1", "launcher"]
        choices = [f"rank {rank}", "launcher"] if phase == "start-up" else choices
        choices += ["worker", "worker"] if workers and phase in ("step", "evaluation", "checkpoint") else []
        target[kind] = draw.choice(choices)
    if kind == "SIGSTOP" and (target[kind] == "launcher" or phase == "export"):
        seconds = (
            seconds or 0.5
        )  # nothing ends a launcher that is stopped for ever, nor a rank after its last collective
    most = {"start-up": 4, "step": 25, "checkpoint": 22, "evaluation": 8, "sampling": 2, "export": 2}[phase]
    delay = 0.0 if kind == NAN or not seconds or draw.random() < 0.5 else draw.uniform(0.001, 0.05)
    return Fault(kind, target[kind], phase, rank, draw.randint(1, most), delay, seconds, draw.getrandbits(30))


def plan(seed: int, number: int) -> tuple[Recipe, list[str], list[Fault], bool]:
    """Return run `number` of a seed: its recipe, flags and faults, and whether it is on two hosts."""
    draw = random.Random(f"{seed}/{number}")
    if draw.random() < 0.03:
        phase = draw.choice(["start-up", "step", "checkpoint", "evaluation"])
        cut = Fault(CUT_LINK, "link", phase, 0, draw.randint(1, 4), 0.0, 0.0, 0)
        return CURVE, ["--timeout", "4"], [cut], True
    recipe = VISION if draw.random() < 0.25 else CURVE
    workers, restarts = draw.random() < 0.3, draw.random() < 0.3
    flags = ["--num_workers", "1"] * workers + ["--max_restarts", "2"] * restarts
    faults = [fault(draw, recipe, workers) for _ in range(FAULTS_PER_RUN)]
    return recipe, flags, sorted(faults, key=lambda f: f.phase == "export"), False


class Campaign:
    """All runs of a seed, and what is known of them."""

    def __init__(self, seed: int, state: Path | None, folder: Path):
        self.seed, self.state, self.folder = seed, state, folder
        self.results: dict[int, Result] = {}
        self.references: dict[str, dict[str, Any]] = {}
        self.wall = 0.0
        if state and state.exists():
            saved = json.loads(state.read_text())
            assert saved["seed"] == seed, f"{state} is of --seed {saved['seed']}"
            self.wall = saved["wall_seconds"]
            self.results = {int(number): _result(values) for number, values in saved["runs"].items()}

    def go_on(self, faults: int, minutes: float, jobs: int) -> None:
        """Run until so many faults have happened in all, or the time is over."""
        started, before = time.monotonic(), self.wall
        if self.faults() >= faults:
            return
        number, running = 0, dict[Future[Result], int]()
        with ThreadPoolExecutor(jobs) as pool:
            while running or (self.faults() < faults and time.monotonic() - started < 60 * minutes):
                while len(running) < jobs and self.faults() < faults and time.monotonic() - started < 60 * minutes:
                    if number not in self.results:
                        running[pool.submit(self.run, number)] = number
                    number += 1
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    index = running.pop(done)
                    self.results[index] = done.result()
                    self.wall = before + time.monotonic() - started
                    self.save()
                    if self.results[index].failure:
                        print(f"run {index}: {self.results[index].failure}", file=sys.stderr, flush=True)

    def run(self, number: int) -> Result:
        recipe, flags, faults, two_nodes = plan(self.seed, number)
        reference = self.reference(recipe)
        with _one_pair_of_hosts if two_nodes else nullcontext():
            return disturbed(self.folder / f"run-{number}", recipe, flags, faults, reference, two_nodes)

    def reference(self, recipe: Recipe) -> dict[str, Any]:
        """Return the end of the undisturbed run, which is trained when it is first asked for."""
        with _one_reference:
            if recipe.name not in self.references:
                self.references[recipe.name] = undisturbed(self.folder / f"undisturbed-{recipe.name}", recipe)
            return self.references[recipe.name]

    def faults(self) -> int:
        return sum(len(result.faults) for result in self.results.values())

    def save(self) -> None:
        if self.state:
            runs = {str(number): asdict(result) for number, result in sorted(self.results.items())}
            self.state.write_text(json.dumps({"seed": self.seed, "wall_seconds": self.wall, "runs": runs}, indent=1))

    def summary(self) -> dict[str, Any]:
        results = [*self.results.values()]
        happened = [f for result in results for f in result.faults]
        complete = [result for result in results if not result.failure]
        steps, useful = sum(r.steps for r in complete), sum(r.useful for r in complete)
        found = Counter[str]()
        for result in results:
            found.update(result.found)
        return {
            "seed": self.seed,
            "faults": len(happened),
            "runs": len(results),
            "runs_equal_to_the_bit": len(complete),
            "failed_runs": len(results) - len(complete),
            "launches": sum(r.launches for r in results),
            "recovered_faults": sum(len(r.faults) for r in complete),
            "found": dict(found),
            "steps": steps,
            "useful_steps": useful,
            "steps_redone": steps - useful,
            "goodput": useful / steps if steps else 0.0,
            "launches_with_traceback": sum(len(r.tracebacks) for r in results),
            "wall_seconds": round(self.wall, 1),
            "by_kind_and_phase": {
                kind: dict(Counter(f.phase for f in happened if f.kind == kind)) for kind in (*KINDS, CUT_LINK)
            },
            "by_target": dict(Counter(f.target for f in happened)),
        }


def _result(values: dict[str, Any]) -> Result:
    return Result(**{**values, "faults": [Fault(**f) for f in values["faults"]]})


def table(summary: dict[str, Any]) -> str:
    """Return faults by kind and phase, and the sums."""
    phases, rows = [*PHASES], summary["by_kind_and_phase"]
    lines = [f"{'':20}" + "".join(f"{name:>12}" for name in (*phases, "all"))]
    for kind, counts in rows.items():
        numbers = [counts.get(phase, 0) for phase in phases]
        lines.append(f"{kind:20}" + "".join(f"{n:12}" for n in (*numbers, sum(numbers))))
    lines.append(
        f"{summary['faults']} faults in {summary['runs']} runs ({summary['launches']} launches): "
        f"{summary['recovered_faults']} recovered, {summary['runs_equal_to_the_bit']} runs equal to the bit, "
        f"{summary['failed_runs']} failed"
    )
    lines.append(
        f"{summary['useful_steps']} useful steps, {summary['steps_redone']} redone: goodput "
        f"{100 * summary['goodput']:.1f} %; {summary['wall_seconds']:.0f} s"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--faults", type=int, default=1000, help="how many, together with those of the state file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="JSON file with what was done; a second call goes on from there")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this time")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("this benchmark fills, mounts and cuts: only root can do that", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the runs in progress end first, and are not counted
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder, zygote():
        campaign = Campaign(options.seed, options.state, Path(folder))
        campaign.go_on(options.faults, options.minutes, options.jobs)
    summary = campaign.summary()
    print(table(summary))
    print(json.dumps(summary))
    return int(summary["failed_runs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
