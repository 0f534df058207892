"""The settings of a run: a flag of `lockstep train` is a field below. `flags.py` reads them.

Each section checks its values when it is made, and knows which of its flags have no effect in a run.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

EXCLUSIVE = [("n_steps", "epochs"), ("global_batch_size", "gradient_accumulation_steps")]


def check(holds: bool, rule: str, value: Any, remedy: str = "") -> None:
    """Refuse a setting: `rule` says what it must be, `value` what it is, `remedy` what to give instead."""
    if not holds:
        raise ValueError(f"{rule}, not {value}{remedy and '; '}{remedy}")


@dataclass(frozen=True)
class RunFacts:
    """What a run is like: by this, and by other settings, some flags have no effect."""

    world_size: int = 1
    local_rank: int = 0
    on_cpu: bool = True
    has_agent: bool = False
    """Whether torchrun's agent has started this process, and can restart it."""
    evaluates: bool = False
    """Whether there are evaluations during training."""
    has_validation_set: bool = False
    generates: bool = False
    own_optimizer: bool = False
    """Whether the recipe has built its optimizer itself."""
    without_ddp: bool = False
    """Whether parameters may take part only in some steps, and gradients are summed without DDP."""
    own_schedule: bool = False


def _unused(*rules: tuple[str, bool, str]) -> dict[str, str]:
    """Return, by flag, the reason of each rule (flag, has no effect, reason) that holds."""
    return {name: reason for name, unused, reason in rules if unused}


@dataclass
class Data:
    """Batch sizes, the length of the run, loader and seed."""

    batch_size: int = 32
    """Samples that one rank puts through the model at once (the micro-batch)."""
    global_batch_size: int | None = None
    """Samples behind one optimizer step, on any number of ranks; accumulation follows from it."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one step on each rank; 0 and 1 both mean none. Also --grad_accumulation_steps."""
    n_steps: int | None = None
    """Length of the run in optimizer steps."""
    epochs: int | None = None
    """Length of the run in passes over the data, instead of n_steps."""
    num_workers: int | None = None
    """Loader processes for each rank; by default 0 on a CPU, up to 8 beside a GPU. Also --workers."""
    seed: int = 0
    """Determines the order of the samples, all noise and the initial weights."""

    def __post_init__(self) -> None:
        check(self.batch_size >= 1, "batch_size is at least 1", self.batch_size)
        check((self.global_batch_size or 1) >= 1, "global_batch_size is at least 1", self.global_batch_size)
        accumulation = self.gradient_accumulation_steps
        check(accumulation >= 0, "gradient_accumulation_steps is at least 0 (0 and 1 both mean none)", accumulation)
        check(self.n_steps is None or self.n_steps >= 1, "n_steps is at least 1", self.n_steps)
        check(self.epochs is None or self.epochs >= 1, "epochs is at least 1", self.epochs)
        check((self.num_workers or 0) >= 0, "num_workers is at least 0", self.num_workers)


BY_OPTIMIZER = {"momentum": "sgd", "beta1": "adamw", "beta2": "adamw"}
"""Flags that only one optimizer has."""


@dataclass
class Optim:
    """The update: optimizer, learning rate, clipping, averaged weights."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: float = 1e-4
    """Learning rate before scaling. Also --learning_rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr follows the global batch: lr × (global batch / base_batch_size), its square root, or not at all."""
    base_batch_size: int = 256
    """The global batch for which lr was chosen."""
    schedule: Literal["constant", "cosine", "linear", "step", "plateau"] = "constant"
    """The learning rate after the warm-up; plateau: lowered when evaluations stop improving."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    warmup_epochs: float = 0.0
    """The same in epochs; the two add up."""
    min_lr: float = 0.0
    """The learning rate at which cosine and linear end, and the lowest of plateau; before scaling."""
    decay_steps: int = 10_000
    """Steps between two drops of the schedule `step`."""
    decay_factor: float = 0.1
    """The factor of each drop of the schedules `step` and `plateau`."""
    decay_patience: int = 5
    """Evaluations in a row without improvement before each drop of the schedule `plateau`."""
    weight_decay: float = 0.0
    """Decay of the weights (decoupled in adamw)."""
    beta1: float = 0.9
    """adamw: decay of the mean gradient."""
    beta2: float = 0.999
    """adamw: decay of the mean squared gradient."""
    momentum: float = 0.9
    """sgd: decay of the velocity."""
    clip_grad: float = 0.0
    """Clip the gradient to this norm; 0: no clipping. Also --grad_clip."""
    max_bad_steps: int = 20
    """Steps in a row with a non-finite gradient (each is skipped on all ranks) after which the run stops."""
    max_bad_share: float = 0.1
    """Share of all steps with a non-finite gradient above which the run fails, once there are five of them."""
    ema_decay: tuple[float, ...] = ()
    """Decays of averaged copies of the weights, none or several; each is ramped up by (1 + n) / (10 + n)."""

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "warmup_steps", "warmup_epochs", "weight_decay", "clip_grad"):
            check(getattr(self, name) >= 0, f"{name} is at least 0", getattr(self, name))
        for name in ("base_batch_size", "decay_steps", "decay_patience", "max_bad_steps"):
            check(getattr(self, name) >= 1, f"{name} is at least 1", getattr(self, name))
        for name in ("beta1", "beta2", "momentum"):
            check(0 <= getattr(self, name) < 1, f"{name} is in [0, 1)", getattr(self, name))
        check(0 <= self.max_bad_share <= 1, "max_bad_share is in [0, 1]", self.max_bad_share)
        for decay in self.ema_decay:
            check(0 < decay < 1, "ema_decay is between 0 and 1", decay)

    def without_effect(self, facts: RunFacts) -> dict[str, str]:
        """Return, by flag, why it has no effect in such a run."""
        optimizer, schedule = f"the optimizer is {self.optimizer}", f"the schedule is {self.schedule}"
        own_schedule = "the recipe has a schedule of its own"
        own_optimizer = "the recipe has an optimizer of its own (unless that reads self.optim)"
        scheduled = ("schedule", "warmup_steps", "warmup_epochs", "min_lr", "decay_steps", "decay_factor")
        return _unused(
            *((name, self.optimizer != kind, optimizer) for name, kind in BY_OPTIMIZER.items()),
            ("base_batch_size", self.lr_scaling == "none", "lr_scaling is none"),
            ("min_lr", self.schedule not in ("cosine", "linear", "plateau"), schedule),
            ("decay_steps", self.schedule != "step", schedule),
            ("decay_factor", self.schedule not in ("step", "plateau"), schedule),
            ("decay_patience", self.schedule != "plateau", schedule),
            *((name, facts.own_schedule, own_schedule) for name in (*scheduled, "decay_patience")),
            *((name, facts.own_optimizer, own_optimizer) for name in ("optimizer", "weight_decay", *BY_OPTIMIZER)),
        )


@dataclass
class Hardware:
    """Processes, devices and speed."""

    nproc: str = "1"
    """Processes to start on this machine: a number, or `auto` for one on each visible GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device; auto: the GPU if there is one."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Arithmetic of the model; auto: bf16 (or fp16) on a GPU that has it, fp32 on a CPU."""
    use_amp: bool = True
    """Mixed precision where the hardware has it; --no_use_amp is --precision fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile the objective; auto: on a GPU."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """What is spread over the ranks: nothing (DDP); optimizer state and averages (ZeRO-1); parameters too (FSDP2)."""
    activation_checkpointing: Literal["none", "blocks", "selective"] = "none"
    """What backward recomputes to save memory: all in a block; selective: all but products and attention."""
    exact: bool = False
    """The same bits on any number of ranks: gradients are summed without rounding, kernels are deterministic."""
    spot_check_every: int = 200
    """Steps between two spot checks of an exact run, in which each rank repeats a tile of another one; 0: none."""
    on_corruption: Literal["stop", "heal", "warn"] = "stop"
    """When a rank computes wrongly or its weights differ; heal: copy weights from other ranks and redo the step."""
    history_every: int = 20
    """Steps between two digests of weights and gradients in history.jsonl of an exact run; 0: none."""
    find_unused_parameters: bool = False
    """Parameters may take part in the loss only in some steps, or on some ranks: gradients are summed without DDP."""
    sync_bn: Literal["auto", "on", "off"] = "auto"
    """BatchNorm statistics over all ranks; auto: where there are several and the model has BatchNorm."""
    grad_compression: Literal["none", "bf16"] = "none"
    """What gradients are rounded to on their way between the ranks; bf16: half the bytes, sums of 8 bits' accuracy."""
    bucket_mb: int = 25
    """Gradients are summed over the ranks in pieces of about so many MB, while backward is still running."""
    max_restarts: int = 0
    """How often --nproc restarts all ranks, from the last checkpoint, after one has failed."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for the others gives up."""
    hang_timeout: float = 120.0
    """Seconds without progress on any rank after which the run is reported as hanging and ended; 0: never."""
    distributed: bool = False
    """Expect to be one of several processes, and print a note if not. Also --ddp."""
    local_rank: int | None = None
    """Accepted from torch.distributed.launch; LOCAL_RANK of the environment is used."""
    world_size: int | None = None
    """Accepted; WORLD_SIZE of the environment is used."""
    dist_url: str = "env://"
    """Accepted; MASTER_ADDR and MASTER_PORT of the environment are used."""

    def __post_init__(self) -> None:
        valid = self.nproc == "auto" or (self.nproc.isdigit() and int(self.nproc) >= 1)
        check(valid, "nproc is `auto` or a number of processes, at least 1", self.nproc)
        check(self.spot_check_every >= 0, "spot_check_every is at least 0 (0: never)", self.spot_check_every)
        check(self.max_restarts >= 0, "max_restarts is at least 0", self.max_restarts)
        check(self.history_every >= 0, "history_every is at least 0 steps (0: never)", self.history_every)
        check(self.timeout > 0, "timeout is more than 0 seconds", self.timeout)
        check(self.bucket_mb >= 1, "bucket_mb is at least 1", self.bucket_mb)
        rounded = self.exact and self.grad_compression != "none"
        check(not rounded, "exact takes --grad_compression none", self.grad_compression, "its sums are not rounded")
        wide = self.exact and self.precision == "fp64"
        check(not wide, "exact takes --precision bf16, fp16 or fp32", "fp64", "its sums are of float32 gradients")
        check(self.hang_timeout >= 0, "hang_timeout is at least 0 seconds (0: never)", self.hang_timeout)
        if not self.use_amp:
            wanted = self.precision in ("auto", "fp32")
            check(wanted, "no_use_amp means --precision fp32; give one of the two", f"--precision {self.precision}")
            self.precision = "fp32"

    def without_effect(self, facts: RunFacts) -> dict[str, str]:
        """Return, by flag, why it has no effect in such a run."""
        return _unused(
            ("max_restarts", not facts.has_agent, "there is one process, and no agent to restart it"),
            ("spot_check_every", not self.exact, "the run is not exact (--exact)"),
            ("spot_check_every", facts.world_size == 1, "there is one rank, and no other to repeat its tiles"),
            ("grad_compression", facts.world_size == 1, "there is one rank, and gradients go nowhere"),
            ("bucket_mb", facts.world_size == 1, "there is one rank, and gradients go nowhere"),
            ("grad_compression", facts.without_ddp, "gradients are summed as they are, without DDP"),
            ("bucket_mb", facts.without_ddp, "gradients are summed without DDP"),
            ("grad_compression", self.find_unused_parameters, "without DDP gradients are sent as they are"),
            ("bucket_mb", self.find_unused_parameters, "without DDP buckets have 25 MB"),
            ("grad_compression", self.shard == "full", "FSDP sums gradients as they are"),
            ("bucket_mb", self.shard == "full", "FSDP sums gradients block by block"),
            ("on_corruption", facts.world_size == 1, "there is one rank, and no other to compare it with"),
            ("shard", facts.world_size == 1, "there is one rank, and no other to share with"),
            ("find_unused_parameters", facts.world_size == 1, "there is one rank: any parameter may be unused"),
            ("history_every", not self.exact, "only an exact run has a history"),
            ("sync_bn", self.exact, "in an exact run BatchNorm has the statistics of a tile"),
            ("use_amp", self.use_amp and facts.on_cpu, "on a CPU it is slower; --precision bf16 turns it on"),
            ("world_size", self.world_size != facts.world_size, f"the environment says {facts.world_size}"),
            ("local_rank", self.local_rank != facts.local_rank, f"the environment says {facts.local_rank}"),
            ("dist_url", self.dist_url != "env://", "MASTER_ADDR and MASTER_PORT of the environment are used"),
            (
                "nproc",
                self.nproc not in ("auto", str(facts.world_size)),
                f"this was started as {facts.world_size} process(es)",
            ),
        )


SERVICES = ("tensorboard", "wandb", "mlflow", "trackio")
"""What `--track` may name."""


@dataclass
class Run:
    """The run's folder, and what is written to it."""

    out: str | None = None
    """The run's folder; by default runs/<recipe>/<date-time>. Also --output_dir, --save_dir."""
    resume: str | None = None
    """`auto`: resume if there is a checkpoint; `latest`: there must be one; or the path of a run or a checkpoint."""
    config: str | None = None
    """A YAML file of flags."""
    preset: str | None = None
    """A named set of flags of the recipe."""
    log_every: int = 50
    """Steps between two logged values."""
    eval_every: str = "0"
    """Steps between two evaluations on the validation set, or epochs (`1ep`); 0: none but at the end."""
    save_every: str = "1000"
    """Steps between two checkpoints, or epochs (`1ep`); 0: only at the end."""
    sample_every: str = "0"
    """Steps, or epochs, between two sets of samples, for recipes that generate; also at the end. 0: none at all."""
    keep: int = 3
    """How many checkpoints to keep besides the best."""
    best_metric: str = "loss"
    """The validation metric that decides which checkpoint is best."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a lower or a higher value is better."""
    patience: int = 0
    """Stop after this many evaluations without improvement; 0: never."""
    min_delta: float = 0.0
    """How much better a value must be to count as an improvement."""
    track: str = "tensorboard"
    """Where values go besides the console and metrics.jsonl: tensorboard, wandb, mlflow, trackio, several with commas
    between them, or none. All write into the run's folder and need no network unless their own variables say so."""
    tensorboard: bool = True
    """False: leave tensorboard out of --track."""
    curves: bool = True
    """Draw curves.png from metrics.jsonl at the end."""
    report: bool = True
    """Write report.html at the end: curves, where the time went, samples, checks."""
    logdir: str | None = None
    """Where TensorBoard events go; by default tensorboard/ in the run's folder."""
    use_wandb: bool = False
    """Add wandb to --track: offline unless WANDB_MODE says otherwise."""
    wandb_project: str = "lockstep"
    """Project of the run in W&B and Trackio, its experiment in MLflow. Also --project."""
    wandb_name: str | None = None
    """Name of the run there; by default that of its folder. Also --run_name."""

    def __post_init__(self) -> None:
        for name in ("eval_every", "save_every", "sample_every"):
            valid = re.fullmatch(r"\d+|\d*\.?\d+ep", getattr(self, name))
            check(bool(valid), f"{name} is a number of steps, or of epochs as in 1ep", getattr(self, name))
        for name in ("patience", "min_delta"):
            check(getattr(self, name) >= 0, f"{name} is at least 0", getattr(self, name))
        for name in ("log_every", "keep"):
            check(getattr(self, name) >= 1, f"{name} is at least 1", getattr(self, name))
        for name in self.track.split(","):
            known = f"track is one or several of {', '.join(SERVICES)} with commas between them, or none"
            check(name.strip() in (*SERVICES, "none", ""), known, self.track)

    def services(self) -> list[str]:
        """Return the trackers that are asked for, besides those that every run has."""
        named = [name.strip() for name in self.track.split(",")] + ["wandb"] * self.use_wandb
        return [name for name in SERVICES if name in named and (name != "tensorboard" or self.tensorboard)]

    def without_effect(self, facts: RunFacts) -> dict[str, str]:
        """Return, by flag, why it has no effect in such a run."""
        no_evaluation = "nothing is evaluated during training"
        return _unused(
            ("eval_every", not facts.has_validation_set and self.eval_every != "0", "there is no validation set"),
            ("patience", not facts.evaluates, no_evaluation),
            ("min_delta", not facts.evaluates, no_evaluation),
            ("best_metric", not facts.evaluates, no_evaluation),
            ("sample_every", not facts.generates, "this recipe generates nothing"),
            ("wandb_project", not {*SERVICES[1:]} & {*self.services()}, "--track names no service that has it"),
            ("wandb_name", not {*SERVICES[1:]} & {*self.services()}, "--track names no service that has it"),
            ("logdir", "tensorboard" not in self.services(), "tensorboard is off"),
        )


@dataclass
class TrainConfig:
    """All settings of the engine, in four groups."""

    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    hardware: Hardware = field(default_factory=Hardware)
    run: Run = field(default_factory=Run)

    def without_effect(self, facts: RunFacts) -> dict[str, str]:
        """Return, by flag, why it has no effect in such a run."""
        sections = (self.optim, self.hardware, self.run)
        return {name: reason for section in sections for name, reason in section.without_effect(facts).items()}
