"""`lockstep bench gpu`: the speed of Lockstep, beside the same model and data in a plain loop and in other libraries.

    lockstep bench gpu                                   all workloads
    lockstep bench gpu --work dit-s,vision               some of them
    lockstep bench gpu --recipe dit --preset laptop      any recipe, with flags of `lockstep train`
    if words[:1] == ["scaling"]:
        return importlib.import_module("..bench.scaling", __package__).run(words[1:])
    if words[:1] not in (["gpu"], ["loader"]):
        raise ValueError("say what to measure: lockstep bench gpu, loader or scaling, and flags")
    prog = f"lockstep bench {words[0]}"
    options, flags = tyro.cli(Bench, args=words[1:], prog=prog, use_underscores=True, return_unknown_args=True)

Each contender runs in a process of its own, one after the other. Those whose package is missing are named and left out.
"""

import importlib
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from ..bench import loading
from ..bench.contenders import CONTENDERS, Contender
from ..bench.results import Row, draw, table, write_json
from ..bench.worker import CEILING, Task, request_for
from ..bench.workloads import WORKLOADS, Workload
from ..distributed import pick_device
from ..nearest import nearest
from ..options import Bench

_LIMIT = 1800.0
"""Seconds after which a contender is ended."""


def run(words: list[str]) -> int:
    """Exit status 1 if a contender failed."""
    if words[:1] == ["scaling"]:
        return importlib.import_module("..bench.scaling", __package__).run(words[1:])
    if words[:1] not in (["gpu"], ["loader"]):
        raise ValueError("say what to measure: lockstep bench gpu, loader or scaling, and flags")
    prog = f"lockstep bench {words[0]}"
    options, flags = tyro.cli(Bench, args=words[1:], prog=prog, use_underscores=True, return_unknown_args=True)
    works = _workloads(options, flags)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if words[0] == "loader":
        costs = [loading.measure(name, request_for(work.recipe, work.flags)) for name, work in works.items()]
        console.print(loading.table(costs))
        return 0
    rows: list[Row] = []
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, work in works.items():
        rows += _measure(name, work, options, console)
        write_json(out / "bench.json", rows, _facts(options))
    if importlib.util.find_spec("matplotlib"):
        draw(out / "bench.png", rows)
    for path in sorted(out.glob("bench.*")):
        print(path)
    return 1 if any(row.failed for row in rows) else 0


def _workloads(options: Bench, flags: list[str]) -> dict[str, Workload]:
    """Return what to train, by name; `flags` hold for all of it."""
    device = ("--device", options.device)
    if options.recipe is not None:
        return {options.recipe: Workload(options.recipe, (*flags, *device))}
    names = [name for name in options.work.split(",") if name] or list(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(
                f"there is no workload {name!r}{nearest(name, WORKLOADS)}; there are {', '.join(WORKLOADS)}, and "
                "--recipe RECIPE [flags] for any other"
            )
    return {name: Workload(w.recipe, (*w.flags, *flags, *device)) for name, w in ((n, WORKLOADS[n]) for n in names)}


def _contenders(options: Bench, compiles: bool, on_gpu: bool) -> tuple[dict[str, Contender], list[str]]:
    """Return who takes part, and the names of those whose package is missing."""
    wanted = [name.strip() for name in options.contenders.split(";") if name.strip()] or list(CONTENDERS)
    for name in wanted:
        if name not in CONTENDERS:
            raise ValueError(f"there is no contender {name!r}{nearest(name, CONTENDERS)}: {'; '.join(CONTENDERS)}")
    chosen = {name: CONTENDERS[name] for name in wanted}
    chosen = {n: c for n, c in chosen.items() if (compiles or not c.compiles) and (on_gpu or not c.on_gpu_only)}
    missing = [name for name, contender in chosen.items() if not contender.installed()]
    return {name: contender for name, contender in chosen.items() if name not in missing}, missing


def _measure(name: str, work: Workload, options: Bench, console: Console) -> list[Row]:
    request = request_for(work.recipe, work.flags)
    on_gpu = pick_device(request.train.hardware.device, 0).type == "cuda"
    compiles = {"auto": on_gpu, "on": True, "off": False}[request.train.hardware.compile]
    contenders, missing = _contenders(options, compiles, on_gpu)
    samples = min(request.train.data.batch_size, request.smoke or request.train.data.batch_size)
    rows = [Row(name, contender, samples) for contender in contenders]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as parent, console.status(name) as status:
        measure = _Measurement(work, options, Path(parent), status.update)
        ceiling, _ = measure(CEILING)
        for row in rows:
            found, row.failed = measure(row.contender)
            if found is not None:
                row.step, row.first_step, row.data_wait = found["step"], found["first_step"], found["data_wait"]
                row.device_idle, row.memory = found["device_idle"], int(found["memory"])
                row.peak_share = ceiling["step"] / row.step / ceiling["peak"] if ceiling and ceiling["step"] else None
    console.print(table(name, rows))
    if missing:
        console.print(f"not installed, left out: {', '.join(missing)}")
    return rows


class _Measurement:
    """Runs contenders of one workload, each in a new process."""

    def __init__(self, work: Workload, options: Bench, folder: Path, say: Callable[[str], Any]):
        self.work, self.options, self.folder, self.say, self.count = work, options, folder, say, 0

    def __call__(self, contender: str) -> tuple[dict[str, Any] | None, str]:
        """Return what was measured, or None and why not."""
        self.say(f"{self.work.recipe}: {contender}")
        self.count += 1
        own = self.folder / str(self.count)
        own.mkdir()
        warmup, steps = self.options.warmup, self.options.steps
        task = Task(self.work.recipe, list(self.work.flags), contender, warmup, steps, time.time(), str(own / "run"))
        (own / "task.json").write_text(json.dumps(asdict(task)))
        command = [sys.executable, "-m", "lockstep.bench.worker", str(own / "task.json"), str(own / "result.json")]
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"not done after {_LIMIT:.0f} s"
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
        return json.loads((own / "result.json").read_text()), ""


def _facts(options: Bench) -> dict[str, Any]:
    """Return what the figures were measured on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() and options.device != "cpu" else None
    return {
        "device": gpu or platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "steps": options.steps,
        "warmup": options.warmup,
        "packages": _versions(["accelerate", "lightning", "pytorch_lightning"]),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
