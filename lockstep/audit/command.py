"""lockstep audit: start any training script on a few ranks, watch it, report its silent bugs."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

import torch
import tyro

from ..cores import check_cores
from ..options import Audit
from ..script import check, split_words
from . import events, report
from .catalog import Finding
from .compare.resume import resume
from .compare.worlds import worlds
from .emulate import cuda_on_cpu
from .ignores import Ignore, by_comments, by_name, sift
from .judges import judge
from .launcher import run_ranks
from .model import Trace
from .project import project_settings
from .source import audit_package, source_lines
from .verdict import Verdict
from .worker import LaunchSpec

_SWITCHES = ("--resume", "--no-resume", "--no_resume")
_OF_FLAGS = ("__resume_args", "__batch_arg")
"""Flags of the audit whose value is a flag of the script, with all hyphens as underscores."""
_NO_SUCH_GPU = ("invalid device ordinal", "out of index range", "num_gpus INTERNAL ASSERT")
"""In errors of CUDA and torch about a GPU that does not exist."""


def audit(words: list[str]) -> int:
    """Run the command and return its exit status: 1 if the script fails the audit, 2 if it could not begin."""
    own, script = split_words(words, _SWITCHES)
    own = _joined(own)
    project = project_settings(script)
    options = tyro.cli(Audit, args=[*project.flags, *own], prog="lockstep audit", use_underscores=True)
    ignores = [*by_name(options.ignore, "--ignore"), *project.ignores]
    command = shlex.join(["lockstep", "audit", *own, *(["--"] if own else []), *script])
    verdict = replace(examine(script, options, ignores), command=command)
    if options.json:
        options.json.write_text(report.as_json(verdict))
    if options.html:
        options.html.write_text(report.as_html(verdict))
    if options.sarif:
        options.sarif.write_text(report.as_sarif(verdict))
    report.show(verdict)
    return verdict.status


def _joined(own: list[str]) -> list[str]:
    """The flags, each in one word with its value where that begins with hyphens itself."""
    words, rest = list[str](), iter(own)
    for word in rest:
        value = next(rest, None) if word.replace("-", "_") in _OF_FLAGS else None
        words.append(word if value is None else f"{word}={value}")
    return words


def examine(script: list[str], options: Audit, ignores: list[Ignore]) -> Verdict:
    """Run the script and judge what its ranks did."""
    check(script, "audit")
    audit_package(script[1] if script[0] == "-m" else None)
    _check_comments(script[0])
    spec = _launch_spec(script, options)
    if options.resume or options.resume_args is not None:
        trace, found, notes = resume(spec, options.resume_args, options.patience, options.limit)
        _check_usage(trace, script)
        return _verdict(script, trace, found, [*notes, *_device_notes(trace, spec)], options, ignores)
    if options.worlds is not None:
        sizes = [int(size) for size in options.worlds.split(",")]
        check_cores(max(sizes))
        trace, found, notes = worlds(spec, sizes, options.batch_arg, options.patience, options.limit)
        _check_usage(trace, script)
        return _verdict(script, trace, found, [*notes, *_device_notes(trace, spec)], options, ignores)
    trace = run_ranks(spec, options.patience, options.limit)
    _check_usage(trace, script)
    if _scales_by_world(trace, script) and spec.nproc > 1:
        trace.single = run_ranks(replace(spec, nproc=1, steps=1), options.patience, options.limit)
    return _verdict(script, trace, judge(trace), list(_notes(trace, spec)), options, ignores)


def _verdict(
    script: list[str], trace: Trace, found: list[Finding], notes: list[str], options: Audit, ignores: list[Ignore]
) -> Verdict:
    """What was found, without what is ignored by name or by a comment in a file that ran."""
    seen = {event.at.file for rank in trace.ranks for event in rank.events if event.at}
    named = {finding.at.file for finding in found if finding.at}
    comments = [by_comments(file) for file in sorted({script[0], *seen, *named})]
    sifted = sift(found, [*ignores, *(ignore for ignores, _ in comments for ignore in ignores)])
    idle = [f"{ignore} ignores nothing: there was no such finding" for ignore in sifted.idle]
    wrong = [message for _, messages in comments for message in messages]
    return Verdict(script, trace, sifted.findings, [*notes, *wrong, *idle], sifted.ignored, options.fail_on)


def _check_comments(script: str) -> None:
    """Raise a ValueError for the first comment of the script that ignores what does not exist."""
    for message in by_comments(script)[1]:
        raise ValueError(message)


def _check_usage(trace: Trace, script: list[str]) -> None:
    """Raise a ValueError if the script wants more ranks, or with what it printed if it did not accept its flags:
    argparse exits with status 2."""
    wanted = max((group.world for _, group in trace.all(events.InitGroup)), default=0)
    if wanted > trace.world:
        problem = f"{script[0]} makes a group of {wanted} ranks, and --nproc is {trace.world}"
        raise ValueError(f"{problem}: give --nproc {wanted}, or the script another number")
    rejected = [rank.printed for rank in trace.ranks if rank.status == 2 and not rank.steps]
    if len(rejected) == trace.world and "Traceback" not in rejected[0] and rejected[0].strip():
        raise ValueError(
            f"{' '.join(script)} did not accept its flags, and nothing was audited:\n{rejected[0].strip()}"
        )


def _launch_spec(script: list[str], options: Audit) -> LaunchSpec:
    check_cores(options.nproc)
    mapped = cuda_on_cpu.is_needed(options.device)
    gpus = 0 if mapped else torch.cuda.device_count()
    if options.device == "cuda" and gpus == 0:
        raise ValueError("--device cuda, but no GPU is visible; use --device cpu")
    shares = not mapped and gpus < options.nproc
    return LaunchSpec(script, options.nproc, options.steps, mapped, shares)


def _notes(trace: Trace, spec: LaunchSpec) -> Iterator[str]:
    """Where what was watched differs from what the script would do elsewhere, and what was not watched."""
    rank = trace.ranks[0]
    if trace.over:
        yield "the script was killed after --limit seconds; the findings are about the time until then"
    yield from _device_notes(trace, spec)
    for failure in trace.failed_probes:
        yield f"a probe failed, and what it checks was not seen ({failure})"
    if rank.first(events.FSDPInit) and any(not weights.checksums for weights in rank.of(events.Weights)):
        yield "sharded parameters differ between ranks: their weights were not compared"
    if averaged := trace.averaging_steps:
        yield f"weights are averaged after steps {', '.join(map(str, averaged))}: ranks differ in between, on purpose"
    elif averager := rank.first(events.SeldomAveraged):
        yield f"weights are averaged every {averager.period} steps: after how many they are equal was not seen"
    if parallel := rank.first(events.TensorParallel):
        numbers = ", ".join(map(str, parallel.ranks))
        yield f"ranks {numbers} hold parts of one layer: that they see the same samples is as it should be"
    started = rank.started_ranks or trace.world
    if started != trace.world:
        yield f"the script would start {started} ranks itself (--nproc {started}); it was watched on {trace.world}"
    if process := rank.first(events.ProcessStarted):
        yield f"the script starts processes of its own ({process.at}), which were not watched"
    if any(start.workers and start.start_method not in (None, "fork") for start in rank.of(events.PassStart)):
        yield "loader workers that are not forked carry no probes: what they draw at random was not seen"
    if rank.steps and not rank.first(events.ModelInput):
        yield "no forward pass of a whole model was seen: `waits` and `changed-inputs` were not looked for"
    if rank.steps and not rank.first(events.PassStart):
        yield "no DataLoader was used: which samples a rank saw is known only from the model's inputs"


def _device_notes(trace: Trace, spec: LaunchSpec) -> Iterator[str]:
    used, failed = trace.ranks[0].first(events.Device), [rank for rank in trace.ranks if rank.failed]
    if spec.cuda_on_cpu and used:
        yield "CUDA was mapped onto the CPU and NCCL onto gloo; autocast ran in bfloat16, nothing was compiled"
        if failed:
            yield "the script failed where CUDA was only mapped; if it is the mapping's fault, try --device cuda"
    if spec.shared_gpu and used:
        ranks = f"{spec.nproc} ranks share one GPU, whichever of {spec.nproc} they ask for"
        yield f"{ranks} (NCCL over sockets): timings mean nothing"
    if spec.shared_gpu:
        output = " ".join(rank.printed + rank.error for rank in failed)
        if "out of memory" in output:
            yield "the memory of one GPU did not hold all ranks: try a smaller batch, or --device cpu"
        if any(message in output for message in _NO_SUCH_GPU):
            yield "the script uses a second GPU in a way that is not mapped onto the first: try --device cpu"


def _scales_by_world(trace: Trace, script: list[str]) -> bool:
    """Whether the source multiplies a learning rate by the world size: then a run on one rank is compared."""
    files = {script[0], *(event.at.file for event in trace.ranks[0].of(events.OptimizerInit) if event.at)}
    world = r"(world_?size|world|num_(gpus|processes|replicas)|n_?gpus?|get_world_size\(\)|device_count\(\))"
    pattern = re.compile(rf"lr\b.*\*=?.*{world}|{world}.*\*.*lr\b", re.IGNORECASE)
    return any(pattern.search(line) for file in files for line in source_lines(file))
