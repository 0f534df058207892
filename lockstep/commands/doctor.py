"""`lockstep doctor [RECIPE]`: is this machine ready to train, and what to do where it is not.

lockstep doctor                       this machine
lockstep doctor dit --batch_size 64   and what limits this run: data, computation or communication
lockstep doctor --hosts A,B           and whether several machines reach one another; start it on each of them
"""

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.text import Text

from .. import launch, registry
from ..doctor import environment, gpus, hosts, machine, ranks, versions, workload
from ..doctor.check import LEVELS, Result, attempt
from ..flags import Request, parse
from ..options import DoctorFlags

RANK_OF = "--rank_of"
"""How this command starts itself as a rank of the all-reduce."""
_NAME = 20
"""Columns of a check's name."""
Group = tuple[str, list[Result]]


def run(words: list[str]) -> int:
    """Exit status 1 if a check is red."""
    if words[:1] == [RANK_OF]:
        return ranks.work(Path(words[1]), words[2])
    spec = words[0] if words and not words[0].startswith("-") else None
    options, rest = tyro.cli(
        DoctorFlags, args=words[1:] if spec else words, prog="lockstep doctor [RECIPE]", use_underscores=True,
        return_unknown_args=True,
    )  # fmt: skip
    variables, request = dict(os.environ), None
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would cut the batch
    if spec is not None:
        recipe = registry.find(spec)
        request = parse(recipe, rest, f"lockstep doctor {recipe.name}")
    elif rest:
        raise ValueError(f"there is no flag {rest[0]}; those of lockstep train come after a RECIPE")
    others = [host.strip() for host in options.hosts.split(",")] if options.hosts else []
    own = hosts.find_self(others) if others else 0
    console = Console(highlight=False, file=sys.stdout)
    groups: list[Group] = []
    for title, results in _examine(options, variables, request, others, own):
        groups.append((title, results))
        if not options.json:
            _show(title, results, console)
    found = [result for _, results in groups for result in results]
    if options.json:
        print(json.dumps({title: [asdict(result) for result in results] for title, results in groups}, indent=2))
    else:
        counts = ", ".join(f"{sum(r.level == level for r in found)} {level}" for level in LEVELS)
        console.print(f"\n{counts}")
    return int(any(result.level == "red" for result in found))


def _examine(
    options: DoctorFlags, variables: Mapping[str, str], request: Request | None, others: list[str], own: int
) -> Iterator[Group]:
    """Yield group after group, each as soon as it is known."""
    cuda, devices = versions.read(), torch.cuda.device_count()
    count = workload.ranks_of(request) if request is not None else max(1, devices)
    yield "versions", attempt("versions", lambda: versions.check(cuda))
    yield "GPUs", attempt("GPUs", lambda: gpus.check(gpus.read()))
    facts = machine.read(options.runs)
    yield "machine", attempt("machine", lambda: machine.check(facts, count))
    in_machine = max(cuda.gpus_in_machine, devices)
    yield "environment", attempt("environment", lambda: environment.check(variables, facts.cores, in_machine))
    reduced = _all_reduce(max(2, count))
    yield "communication", attempt("all-reduce", lambda: ranks.check(reduced))
    if request is not None:
        wanted, bandwidth = request, reduced.bandwidth if reduced else None
        yield (
            f"recipe {request.recipe.name}",
            attempt("recipe", lambda: workload.check(wanted, bandwidth, count, facts.cores)),
        )
    if others:
        yield (
            "machines",
            attempt(
                "machines", lambda: hosts.check(hosts.examine(others, own, options.port, options.wait), options.port)
            ),
        )


def _all_reduce(count: int) -> ranks.AllReduce | None:
    """Return what an all-reduce has shown: between the GPUs, or between processes if there are fewer than two."""
    gpus_visible = torch.cuda.device_count()
    device = "cuda" if gpus_visible >= 2 else "cpu"
    nproc = min(count, gpus_visible, 8) if device == "cuda" else 2
    kept = dict(os.environ)
    try:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
            launch.start(nproc, ["-m", "lockstep", "doctor", RANK_OF, folder, device])
            return ranks.read(Path(folder))
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _show(title: str, results: list[Result], console: Console) -> None:
    console.print(Text(title, style="bold"))
    width = max(40, console.width) - _NAME - 10
    for result in results:
        lines = textwrap.wrap(result.found, width) or [""]
        if result.remedy:
            lines += [
                f"→ {line}" if i == 0 else f"  {line}" for i, line in enumerate(textwrap.wrap(result.remedy, width - 2))
            ]
        if len(result.name) >= _NAME:  # a line of its own
            lines.insert(0, "")
        for i, line in enumerate(lines):
            text = Text("  ")
            text.append(f"{result.level if i == 0 else '':7} ", style=result.level)
            text.append(f"{result.name if i == 0 else '':{_NAME}}{line}")
            console.print(text, soft_wrap=True)
