"""Flags of all commands but `lockstep train`, whose are in config.py. Imports no torch, so that --help is quick."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from .config import Hardware, check

LIMITS = {"fp64": (1e-9, 1e-9), "fp32": (math.inf, 1e-4)}
"""By precision: the largest difference of weights (relative to each tensor's norm) and of losses that is rounding."""


@dataclass
class UseFlags:
    """Which weights of the run, and on what."""

    weights: Literal["auto", "ema", "plain"] = "auto"
    """Averaged weights, plain ones, or averaged if there are any."""
    checkpoint: str = "last"
    """`last`, `best`, or the name of a folder in checkpoints/."""
    out: str | None = None
    """Where results go; by default into the run's folder."""
    nproc: str = "1"
    """Processes to share the work: a number, or `auto` for one on each visible GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    batch_size: int = 64
    """Samples at once on each rank."""
    seed: int = 0
    """Another seed, other samples."""
    recipe: str | None = None
    """Name or FILE.py:Class of the recipe. Needed for a run from elsewhere with a recipe of its own: the file is
    executed."""

    def hardware(self) -> Hardware:
        return Hardware(nproc=self.nproc, device=self.device)


@dataclass
class ExportFlags:
    """In which form, and which weights."""

    to: Literal["hf", "safetensors", "dcp"]
    """hf: a folder for `from_pretrained`; safetensors: one file; dcp: a folder of torch.distributed.checkpoint."""
    ema: bool = False
    """Averaged weights; of several averages the first."""
    checkpoint: str = "last"
    """`last`, `best`, or the name of a folder in checkpoints/."""
    out: str | None = None
    """The folder to write to; by default RUN/export/FORM."""
    recipe: str | None = None
    """For hf: name or FILE.py:Class of the recipe. Needed for a run from elsewhere with a recipe of its own: the file
    is executed."""


@dataclass
class Verify:
    """What to compare; further flags are those of `lockstep train`."""

    worlds: str = "1,2,3,4"
    """Numbers of ranks, separated by commas; the first is what the others are compared with."""
    steps: int = 50
    """Steps of each run."""
    bits: bool = False
    """Train exactly, as with --exact, and compare bits."""
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic; auto: fp64, with --bits that of training. In fp32 without --bits losses are compared, to 1e-4."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""

    def __post_init__(self) -> None:
        if not all(w.isdigit() and int(w) for w in self.worlds.split(",")):
            raise ValueError(f"worlds is a list of numbers such as 1,2,4, not {self.worlds!r}")
        if self.steps < 1:
            raise ValueError(f"steps is at least 1, not {self.steps}")
        if not self.bits:
            self.precision = "fp64" if self.precision == "auto" else self.precision
            if self.precision not in LIMITS:
                raise ValueError(f"precision is fp64 or fp32, not {self.precision}; with --bits also bf16 and fp16")
        elif self.precision == "fp64":
            raise ValueError(
                "--bits compares runs in fp32, bf16 or fp16, not fp64: exact sums are of float32 gradients"
            )


@dataclass
class ReplayFlags:
    """Which step, and on what."""

    step: int
    """The step to redo; the first one is 1."""
    samples: bool = False
    """List the samples of the step with their losses, and write all of them to RUN/replay/, with pictures of some."""
    show: int = 10
    """How many samples to print, and to draw."""
    out: str | None = None
    """Where the samples are written; by default RUN/replay."""
    nproc: str = "1"
    """Processes to replay on: a number, or `auto` for one on each visible GPU."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where to compute; by default as the run."""
    recipe: str | None = None
    """Name or FILE.py:Class of the recipe. Needed for a run from elsewhere with a recipe of its own: the file is
    executed."""

    def __post_init__(self) -> None:
        check(self.step >= 1, "step is at least 1", self.step)
        check(self.show >= 1, "show is at least 1", self.show)
        Hardware(nproc=self.nproc)  # checks it


@dataclass
class BisectFlags:
    """What to draw, and how to replay."""

    plot: str | None = None
    """A PNG file for the logged values of both runs, side by side."""
    replay: bool = True
    """Replay both runs where their histories part, to find the step and the tensor."""
    nproc: str = "1"
    """Processes to replay on: a number, or `auto` for one on each visible GPU."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where to replay; by default as the runs."""
    recipe: str | None = None
    """Name or FILE.py:Class of the recipe, for runs from elsewhere with a recipe of their own: the file is executed."""

    def __post_init__(self) -> None:
        Hardware(nproc=self.nproc)  # checks it


@dataclass
class TopFlags:
    """How often to look."""

    every: float = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Print the state of this moment, and exit: with 0 if the run is running, else with 1."""

    def __post_init__(self) -> None:
        check(self.every >= 0.1, "every is at least 0.1 seconds", self.every)


@dataclass
class ReportFlags:
    """What to write."""

    out: str | None = None
    """The HTML file; by default report.html in the folder of the first run."""


@dataclass
class DoctorFlags:
    """What to check besides this machine. After RECIPE, further flags are those of `lockstep train`."""

    hosts: str | None = None
    """All machines of a job by name or address, separated by commas. Start the same command on each of them."""
    port: int = 29400
    """The port on which the machines of --hosts talk to one another."""
    wait: float = 60.0
    """Seconds to wait for the other machines of --hosts."""
    runs: Path = Path("runs")
    """The folder that runs go to: its disk is checked."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        check(1 <= self.port <= 65535, "port is between 1 and 65535", self.port)
        check(self.wait > 0, "wait is more than 0 seconds", self.wait)


@dataclass
class PlanFlags:
    """On which hardware. Further flags are those of `lockstep train`: the run to plan."""

    gpus: str = "1,2,4,8"
    """Numbers of GPUs in each machine to compare, separated by commas."""
    gpu: Literal["2080ti", "4090", "a100", "h100", "h200"] = "h100"
    """The kind of GPU."""
    nodes: int = 1
    """Machines, with as many GPUs in each."""
    network: float | None = None
    """Gbit/s between two machines; by default as such machines usually have."""
    measure: bool = False
    """Correct the prediction by a few real steps on this machine's GPU."""
    plot: Path | None = None
    """A PNG file for speed-up and memory."""
    json: bool = False
    """Print everything as JSON."""

    def __post_init__(self) -> None:
        valid = all(word.isdigit() and int(word) for word in self.gpus.split(","))
        check(valid, "gpus is a list of numbers such as 1,2,4,8", repr(self.gpus))
        check(self.nodes >= 1, "nodes is at least 1", self.nodes)
        check(self.network is None or self.network > 0, "network is more than 0 Gbit/s", self.network)


@dataclass
class Audit:
    """What to watch, and for how long. Then comes the script with its own flags, or -m and a module."""

    nproc: int = 2
    """Ranks to start."""
    steps: int = 20
    """Optimizer steps to watch; 0: until the script ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: CUDA and NCCL are mapped onto the CPU and gloo. auto: cpu if there is no GPU."""
    json: Path | None = None
    """File for the findings, as JSON."""
    html: Path | None = None
    """File for a report: one page with code, timeline and sample ledger."""
    patience: float = 30.0
    """Seconds without progress on any rank after which the script counts as hanging."""
    limit: float = 1800.0
    """Seconds after which the script is killed in any case."""
    fail_on: Literal["error", "warning", "note", "never"] = "error"
    """Findings from which on the exit status is 1. A script that crashes or hangs fails in any case."""
    ignore: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of a finding that is not reported; can be given several times."""
    sarif: Path | None = None
    """File for the findings, in SARIF 2.1.0: what GitHub and others show in pull requests."""
    resume: bool = False
    """Kill the script after a checkpoint, resume it, and say what was lost. It runs in a copy of the current folder."""
    resume_args: str | None = None
    """Flags that resume the script, such as "--resume {checkpoint}"; by default those of its parser."""
    worlds: str | None = None
    """Numbers of ranks such as 1,2: run the script on each with the same global batch, and compare the losses."""
    batch_arg: str | None = None
    """The script's flag for the batch size of one rank; without it, that of each DataLoader is multiplied."""

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("steps", 0), ("patience", 0.1), ("limit", 1)):
            check(getattr(self, name) >= least, f"{name} is at least {least}", getattr(self, name))
        worlds = (self.worlds or "1,2").split(",")
        valid = len(set(worlds)) == len(worlds) > 1 and all(w.isdigit() and int(w) for w in worlds)
        check(valid, "worlds is a list of different numbers such as 1,2", self.worlds)
        check(self.worlds is None or not self.resume, "worlds and resume are two audits: choose one", self.worlds)
        check(self.batch_arg is None or self.worlds is not None, "batch_arg is for --worlds", self.batch_arg)


@dataclass
class RunScript:
    """How many ranks, and what is watched. Then comes the script with its own flags, or -m and a module."""

    nproc: str = "1"
    """Ranks to start on this machine: a number, or `auto` for one on each visible GPU."""
    max_restarts: int = 0
    """Times that all ranks are started again after one has failed; the script resumes from its own checkpoint."""
    hang_timeout: float = 300.0
    """Seconds without progress on any rank after which the stacks of all ranks are reported and the ranks end; 0:
    never."""
    check_every: int = 50
    """Optimizer steps between two comparisons of the weights of all ranks; 0: they are not compared."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """What happens when the ranks no longer hold the same weights."""
    grace: int = 120
    """Seconds that the script has to end by itself after Ctrl-C or SIGTERM."""

    def __post_init__(self) -> None:
        Hardware(nproc=self.nproc)  # checks it
        for name in ("max_restarts", "hang_timeout", "check_every", "grace"):
            check(getattr(self, name) >= 0, f"{name} is at least 0", getattr(self, name))


@dataclass
class Bench:
    """What to measure; further flags are those of `lockstep train`, for every workload."""

    work: str = ""
    """Workloads, separated by commas: dit-s, dit-xl, jit-b, vision, vision-512, protein, protein-32, scribble; by
    default all."""
    recipe: str | None = None
    """Name or FILE.py:Class of a recipe to measure instead, with its own defaults and the further flags."""
    contenders: str = ""
    """Who takes part, separated by semicolons, such as "plain loop; Accelerate; Lockstep"; by default all."""
    steps: int = 30
    """Steps that are timed."""
    warmup: int = 10
    """Steps before them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    out: str = "bench"
    """Folder for bench.json and bench.png."""

    def __post_init__(self) -> None:
        check(self.steps >= 1, "steps is at least 1", self.steps)
        check(self.warmup >= 1, "warmup is at least 1", self.warmup, "compiling and the first batch take time")
        check(not (self.work and self.recipe), "give either --work or --recipe", f"{self.work} and {self.recipe}")


@dataclass
class Scaling:
    """What to measure; further flags are those of `lockstep train`, for every recipe."""

    recipes: str = "dit,vision"
    """Names or FILE.py:Class of recipes, separated by commas; each with its preset `laptop`."""
    nproc: int = 2
    """Ranks to compare with one."""
    steps: int = 10
    """Steps of each round."""
    rounds: int = 5
    """Rounds alone and together; the fastest of each counts, by processor time the median."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for name, least in (("nproc", 2), ("steps", 1), ("rounds", 1)):
            check(getattr(self, name) >= least, f"{name} is at least {least}", getattr(self, name))
