"""lockstep audit: start any training script on a few ranks, watch it, say what is silently wrong with it."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from . import report
from .catalog import Finding
from .emulate import cuda_on_cpu
from .judge import judge
from .launcher import run_ranks
from .trace import Trace, claim, where
from .worker import LaunchSpec


@dataclass
class Audit:
    """What to watch, and for how long. What follows -- is the script with its own flags, or -m and a module."""

    nproc: int = 2
    """Ranks to start."""
    steps: int = 20
    """Optimizer steps after which the audit has seen enough; 0: until the script ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: what the script does with CUDA and NCCL is done on the CPU with gloo. auto: so, where there is no GPU."""
    json: Path | None = None
    """Write the findings here, for programs."""
    html: Path | None = None
    """Write a report here, for people: one page with code, timeline and ledger."""
    patience: float = 30.0
    """Seconds without any progress on any rank after which the script is taken to hang."""
    limit: float = 1800.0
    """Seconds after which it is ended in any case."""

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("steps", 0), ("patience", 0.1), ("limit", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")


_NOT_THERE = ("invalid device ordinal", "out of index range", "num_gpus INTERNAL ASSERT")
"""What CUDA and torch say of a GPU that is not there."""


@dataclass(frozen=True)
class Verdict:
    """What an audit found."""

    words: list[str]
    trace: Trace
    findings: list[Finding]
    notes: list[str]
    """Where what was watched is not quite what the script would do elsewhere."""

    @property
    def status(self) -> int:
        return int(any(f.severity == "error" for f in self.findings))


def audit(words: list[str]) -> int:
    """The command. Exit status 1 if there are errors, 2 if it could not begin."""
    split = words.index("--") if "--" in words else len(words)
    options = tyro.cli(Audit, args=words[:split], prog="lockstep audit", use_underscores=True)
    verdict = examine(words[split + 1 :], options)
    if options.json:
        options.json.write_text(report.as_json(verdict))
    if options.html:
        options.html.write_text(report.as_html(verdict))
    report.show(verdict)
    return verdict.status


def examine(script: list[str], options: Audit) -> Verdict:
    """Run the script and judge what its ranks did."""
    _check(script)
    claim(script[1] if script[0] == "-m" else None)
    spec = _launch_spec(script, options)
    trace = run_ranks(spec, options.patience, options.limit)
    if _scales_by_world(trace, script) and spec.nproc > 1:
        trace.alone = run_ranks(replace(spec, nproc=1, steps=1), options.patience, options.limit)
    return Verdict(script, trace, judge(trace), _remarks(trace, spec))


def _check(script: list[str]) -> None:
    if not script:
        raise ValueError("say what to audit: lockstep audit [flags] -- train.py [its flags], or -- -m module")
    if script[0] == "-m":
        if len(script) < 2:
            raise ValueError("-m takes the name of a module")
    elif not Path(script[0]).is_file():
        raise ValueError(f"there is no script {script[0]!r} here ({Path.cwd()})")


def _launch_spec(script: list[str], options: Audit) -> LaunchSpec:
    mapped = cuda_on_cpu.is_needed(options.device)
    gpus = 0 if mapped else torch.cuda.device_count()
    if options.device == "cuda" and gpus == 0:
        raise ValueError("--device cuda, but no GPU is visible; use --device cpu")
    shares = not mapped and gpus < options.nproc
    return LaunchSpec(script, options.nproc, options.steps, mapped, shares)


def _remarks(trace: Trace, spec: LaunchSpec) -> list[str]:
    remarks = []
    rank = trace.ranks[0]
    if trace.over:
        remarks.append("the time was over (--limit) before the script ended; what is said holds up to there")
    if spec.cuda_on_cpu and rank.of("device"):
        remarks.append(
            "CUDA was mapped onto the CPU and NCCL onto gloo; autocast ran in bfloat16, nothing was compiled"
        )
    if spec.cuda_on_cpu and rank.of("device") and any(r.failed for r in trace.ranks):
        remarks.append("the script failed where CUDA was only mapped; if it is the mapping's fault, try --device cuda")
    if spec.shared_gpu and rank.of("device"):
        remarks.append(
            f"{spec.nproc} ranks share one GPU, whichever of {spec.nproc} they ask for (NCCL over sockets): timings "
            "mean nothing"
        )
    said = " ".join(r.printed + (r.first("end") or {}).get("why", "") for r in trace.ranks if r.failed)
    if spec.shared_gpu and "out of memory" in said:
        remarks.append("the memory of one GPU did not hold all ranks: try a smaller batch, or --device cpu")
    if spec.shared_gpu and any(words in said for words in _NOT_THERE):
        remarks.append(
            "the script reached for a second GPU in a way that is not mapped onto the first: try --device cpu"
        )
    remarks += [f"a probe failed, and what it looks at was not seen ({failure})" for failure in trace.blind]
    if any(not s.get("sums", True) for s in rank.steps) and rank.of("fsdp"):
        remarks.append("sharded parameters are each rank's own: their weights were not compared")
    if group := rank.first("tensor_parallel"):
        numbers = ", ".join(map(str, group["ranks"]))
        remarks.append(f"ranks {numbers} hold parts of one layer: that they see the same samples is as it should be")
    begun = max((s["nprocs"] for s in rank.of("spawn")), default=trace.world)
    if rank.of("rank_started"):
        begun = max(r[key] for kind, key in (("rank_started", "n"), ("meeting", "world")) for r in rank.of(kind))
    if begun != trace.world:
        remarks.append(
            f"the script would start {begun} ranks itself (--nproc {begun}); it was watched on {trace.world}"
        )
    if started := rank.first("process"):
        at = where(started)
        remarks.append(f"the script starts processes of its own ({at}), which were not watched")
    if any(r["workers"] and r["start"] not in (None, "fork") for r in rank.of("loader")):
        remarks.append("loader workers that are not forked carry no probes: what they draw at random was not seen")
    if rank.steps and not rank.of("loader"):
        remarks.append("no DataLoader was used: which samples a rank saw is known only from the model's inputs")
    return remarks


def _scales_by_world(trace: Trace, script: list[str]) -> bool:
    """Whether the source multiplies a learning rate by the world: worth a second run on one rank to compare with."""
    files = {script[0]} if Path(script[0]).is_file() else set()
    files |= {r["at"][0] for r in trace.ranks[0].of("optimizer") if r.get("at")}
    world = r"(world_?size|world|num_(gpus|processes|replicas)|n_?gpus?|get_world_size\(\)|device_count\(\))"
    pattern = re.compile(rf"lr\b[^\n]*\*=?[^\n]*{world}|{world}[^\n]*\*[^\n]*lr\b", re.IGNORECASE)
    return any(pattern.search(Path(f).read_text(errors="replace")) for f in files if Path(f).is_file())
