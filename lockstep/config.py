"""The settings of a run. A flag is a field below; a YAML file, a preset and a recipe's defaults are lists of flags.

All of them go through one parser, in this order, and the last one wins:

    the recipe's defaults, --preset NAME, the run that is resumed, --config FILE, the command line

so `batch_size: 64` in a file means exactly what `--batch_size 64` means. Flags that exclude each other (`n_steps` and
`epochs`) may stand in different places, where the later one wins, but not in the same one.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from .recipe import Recipe, nearest

ALIASES = {
    "learning_rate": "lr",
    "batchsize": "batch_size",
    "workers": "num_workers",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "accumulation": "gradient_accumulation_steps",
    "output_dir": "out",
    "save_dir": "out",
    "grad_clip": "clip_grad",
    "ddp": "distributed",
    "max_steps": "n_steps",
}
"""Other names that guides and scripts use for a flag."""

RUNS = Path("runs")
"""Where runs go, each recipe's in a folder of its own."""

EXCLUSIVE = [("n_steps", "epochs"), ("global_batch_size", "gradient_accumulation_steps")]


def _check(holds: bool, rule: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{rule}, not {value}")


@dataclass
class Data:
    """How much data makes a step, and how long the run is."""

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
    """Names the order of the samples, all noise and the initial weights."""

    def __post_init__(self) -> None:
        _check(self.batch_size >= 1, "batch_size is at least 1", self.batch_size)
        _check((self.global_batch_size or 1) >= 1, "global_batch_size is at least 1", self.global_batch_size)
        accumulation = self.gradient_accumulation_steps
        _check(accumulation >= 0, "gradient_accumulation_steps is at least 0 (0 and 1 both mean none)", accumulation)
        _check(self.n_steps is None or self.n_steps >= 1, "n_steps is at least 1", self.n_steps)
        _check(self.epochs is None or self.epochs >= 1, "epochs is at least 1", self.epochs)
        _check((self.num_workers or 0) >= 0, "num_workers is at least 0", self.num_workers)


@dataclass
class Optim:
    """The update: optimizer, learning rate, clipping, averaged weights."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The rule that turns gradients into steps."""
    lr: float = 1e-4
    """Learning rate before scaling. Also --learning_rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr follows the global batch: lr × (global batch / base_batch_size), its square root, or not at all."""
    base_batch_size: int = 256
    """The global batch for which lr was chosen."""
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """What the learning rate does after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    warmup_epochs: float = 0.0
    """The same in epochs; the two add up."""
    min_lr: float = 0.0
    """Where cosine and linear end, before scaling."""
    decay_steps: int = 10_000
    """Steps between two drops of the schedule `step`."""
    decay_factor: float = 0.1
    """What the schedule `step` multiplies by at each drop."""
    weight_decay: float = 0.0
    """Decay of the weights (decoupled in adamw)."""
    beta1: float = 0.9
    """adamw: decay of the mean gradient."""
    beta2: float = 0.999
    """adamw: decay of the mean squared gradient."""
    momentum: float = 0.9
    """sgd: decay of the velocity."""
    clip_grad: float = 0.0
    """Largest norm of the gradient; 0 for no clipping. Also --grad_clip."""
    max_bad_steps: int = 20
    """Steps in a row with a non-finite gradient (each is skipped on all ranks) after which the run stops."""
    ema_decay: tuple[float, ...] = ()
    """Decays of averaged copies of the weights, none or several; each is ramped up by (1 + n) / (10 + n)."""

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "warmup_steps", "warmup_epochs", "weight_decay", "clip_grad"):
            _check(getattr(self, name) >= 0, f"{name} is at least 0", getattr(self, name))
        for name in ("base_batch_size", "decay_steps", "max_bad_steps"):
            _check(getattr(self, name) >= 1, f"{name} is at least 1", getattr(self, name))
        for name in ("beta1", "beta2", "momentum"):
            _check(0 <= getattr(self, name) < 1, f"{name} is in [0, 1)", getattr(self, name))
        for decay in self.ema_decay:
            _check(0 < decay < 1, "ema_decay is between 0 and 1", decay)


@dataclass
class Hardware:
    """Processes, devices and speed."""

    nproc: str = "1"
    """Processes to start on this machine: a number, or `auto` for one on each visible GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the GPU if there is one."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    """Arithmetic of the model; auto: bf16 (or fp16) on a GPU that has it, fp32 on a CPU."""
    use_amp: bool = True
    """Mixed precision where the hardware has it; --no_use_amp is --precision fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile the objective; auto: on a GPU."""
    sync_bn: Literal["auto", "on", "off"] = "auto"
    """BatchNorm statistics over all ranks; auto: where there are several and the model has BatchNorm."""
    max_restarts: int = 0
    """How often --nproc starts all ranks again, from the last checkpoint, when one has died."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for the others gives up."""
    distributed: bool = False
    """Expect to be one of several processes, and say so if not. Also --ddp."""
    local_rank: int | None = None
    """Accepted from torch.distributed.launch; LOCAL_RANK of the environment holds."""
    world_size: int | None = None
    """Accepted; WORLD_SIZE of the environment holds."""
    dist_url: str = "env://"
    """Accepted; MASTER_ADDR and MASTER_PORT of the environment hold."""

    def __post_init__(self) -> None:
        valid = self.nproc == "auto" or (self.nproc.isdigit() and int(self.nproc) >= 1)
        _check(valid, "nproc is `auto` or a number of processes, at least 1", self.nproc)
        _check(self.max_restarts >= 0, "max_restarts is at least 0", self.max_restarts)
        _check(self.timeout > 0, "timeout is more than 0 seconds", self.timeout)
        if not self.use_amp:
            wanted = self.precision in ("auto", "fp32")
            _check(wanted, "no_use_amp means --precision fp32; give one of the two", f"--precision {self.precision}")
            self.precision = "fp32"


@dataclass
class Run:
    """Where the run goes and what it writes on the way."""

    out: str | None = None
    """The run's folder; by default runs/<recipe>/<date-time>. Also --output_dir, --save_dir."""
    resume: str | None = None
    """`auto`: go on if there is a checkpoint; `latest`: there must be one; or the path of a run or a checkpoint."""
    config: str | None = None
    """A YAML file of flags."""
    preset: str | None = None
    """A named set of flags of the recipe."""
    log_every: int = 50
    """Steps between two logged values."""
    eval_every: int = 0
    """Steps between two evaluations on the validation set; 0: none."""
    save_every: int = 1000
    """Steps between two checkpoints; 0: only at the end."""
    sample_every: int = 0
    """Steps between two sets of samples, for recipes that generate; 0: only at the end."""
    keep: int = 3
    """How many checkpoints to keep besides the best."""
    best_metric: str = "loss"
    """The validation metric that decides which checkpoint is best."""
    best_mode: Literal["min", "max"] = "min"
    """Whether less of it is better or more."""
    patience: int = 0
    """Stop after this many evaluations without improvement; 0: never."""
    min_delta: float = 0.0
    """What counts as an improvement."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    logdir: str | None = None
    """Where TensorBoard events go; by default tensorboard/ in the run's folder."""
    use_wandb: bool = False
    """Log to Weights & Biases, offline unless WANDB_MODE says otherwise."""
    wandb_project: str = "lockstep"
    """Project of the W&B run."""
    wandb_name: str | None = None
    """Name of the W&B run."""

    def __post_init__(self) -> None:
        for name in ("eval_every", "save_every", "sample_every", "patience", "min_delta"):
            _check(getattr(self, name) >= 0, f"{name} is at least 0", getattr(self, name))
        for name in ("log_every", "keep"):
            _check(getattr(self, name) >= 1, f"{name} is at least 1", getattr(self, name))


@dataclass
class TrainConfig:
    """All settings of the engine, in four groups."""

    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    hardware: Hardware = field(default_factory=Hardware)
    run: Run = field(default_factory=Run)


@dataclass
class Request:
    """What the user asked for: settings, the recipe's options, and which of them the user gave."""

    recipe: type[Recipe]
    train: TrainConfig
    options: Any
    given: frozenset[str] = frozenset()
    smoke: int | None = None

    def flat(self) -> dict[str, Any]:
        """Every setting by flag name, as a YAML file would hold it."""
        groups = [self.options, *(getattr(self.train, f.name) for f in dataclasses.fields(self.train))]
        return {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}

    def write(self, path: Path) -> None:
        """The settings as a file that `--config` reads, without what is unset or about this start alone."""
        this_start = {"resume", "config", "preset", "out", "nproc", "local_rank", "world_size"}
        settings = {k: v for k, v in self.flat().items() if v is not None and k not in this_start}
        for holds, idle in EXCLUSIVE:
            if holds in settings:
                settings.pop(idle, None)
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        write_whole(path, yaml.safe_dump(settings, sort_keys=False))


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename: whoever reads it, or is killed, finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text)
    beside.replace(path)


Flag = tuple[str, list[str]]
"""A flag's name and the words of it as typed: ("batch_size", ["--batch_size", "64"])."""


def parse(recipe: type[Recipe], argv: Sequence[str], prog: str) -> Request:
    """The settings that `argv` and the files it names ask for."""
    target = _target(recipe)
    known = _known(target)
    defaults: Any = tyro.cli(
        target, args=_words(_from_mapping(recipe.defaults, known, recipe.__name__)), config=(tyro.conf.OmitArgPrefixes,)
    )
    typed = _split(argv, known)
    below, file = _files(recipe, typed, known)
    layers = _settle_exclusive([*below, file, typed])
    for winner, loser in (*EXCLUSIVE, *((b, a) for a, b in EXCLUSIVE)):
        if any(name == winner for layer in layers for name, _ in layer):
            _forget(defaults, loser)
    flags = list({flag[0]: flag for layer in layers for flag in layer}.values())
    result: Any = tyro.cli(
        target,
        args=_words(flags),
        default=defaults,
        prog=prog,
        description=(recipe.__doc__ or "").strip(),
        use_underscores=True,
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    train = TrainConfig(**{f.name: getattr(result, f.name) for f in dataclasses.fields(TrainConfig)})
    request = Request(recipe, train, getattr(result, _group(recipe)), frozenset(name for name, _ in [*file, *typed]))
    _apply_smoke(request)
    return request


def _group(recipe: type[Recipe]) -> str:
    """The recipe's group of flags is named after it."""
    name = recipe.name
    return name if name.isidentifier() and name not in {f.name for f in dataclasses.fields(TrainConfig)} else "recipe"


def _target(recipe: type[Recipe]) -> type:
    """One dataclass of all flags: the recipe's own first."""
    options = (_group(recipe), recipe.Options, field(default_factory=recipe.Options))
    engine = [(f.name, f.type, field(default_factory=f.default_factory)) for f in dataclasses.fields(TrainConfig)]
    return dataclasses.make_dataclass("Flags", [options, *engine])


def _known(target: type) -> dict[str, bool]:
    """Every flag name, and whether it is a yes-or-no one."""
    return {f.name: f.type is bool for group in dataclasses.fields(target) for f in dataclasses.fields(group.type)}  # type: ignore[arg-type]


def _forget(defaults: Any, name: str) -> None:
    """Put a setting back to the engine's default, because the user gave the one that excludes it."""
    for group in (getattr(defaults, f.name) for f in dataclasses.fields(defaults)):
        for f in dataclasses.fields(group):
            if f.name == name:
                setattr(group, name, f.default)


def _split(argv: Sequence[str], known: Mapping[str, bool]) -> list[Flag]:
    """Command-line words, flag by flag, under their canonical names."""
    flags: list[Flag] = []
    for word in argv:
        if not word.startswith("--") or word == "--":
            flags[-1:] = [(flags[-1][0], [*flags[-1][1], word])] if flags else [("", [word])]
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        name = ALIASES.get(name, name) if name not in known else name
        positive = name.removeprefix("no_")
        flags.append((positive if known.get(positive) else name, [f"--{name}{equals}{value}"]))
    return flags


def _words(flags: Iterable[Flag]) -> list[str]:
    return [word for _, words in flags for word in words]


def _from_mapping(mapping: Mapping[str, Any], known: Mapping[str, bool], source: str) -> list[Flag]:
    """A YAML file's or a preset's settings as flags."""
    flags: list[Flag] = []
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        name = ALIASES.get(name, name) if name not in known else name
        if name not in known:
            raise ValueError(f"{source}: there is no setting {key!r}{nearest(name, known)}")
        if known[name]:
            yes = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
            if str(value).lower() not in yes:
                raise ValueError(f"{source}: {key} is true or false, not {value!r}")
            flags.append((name, [f"--{name}" if yes[str(value).lower()] else f"--no_{name}"]))
        elif isinstance(value, list | tuple):
            flags.append((name, [f"--{name}", *map(str, value)]))
        elif isinstance(value, Mapping):
            raise ValueError(f"{source}: {key} is one value, not a group of settings")
        else:
            flags.append((name, [f"--{name}", "None" if value in (None, "null", "~", "") else str(value)]))
    return flags


def read_yaml(path: Path) -> Mapping[str, Any]:
    """A file of settings, every value still a word: the flags' own parser gives it its type."""
    try:
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content or {}, Mapping):
        raise ValueError(f"{path} is a list of `flag: value` lines, not a {type(content).__name__}")
    return content or {}


def _files(recipe: type[Recipe], typed: list[Flag], known: Mapping[str, bool]) -> tuple[list[list[Flag]], list[Flag]]:
    """What the command line names: the layers of preset and resumed run, and that of the config file."""
    values = {name: words[0].partition("=")[2] if "=" in words[0] else " ".join(words[1:]) for name, words in typed}
    layers = []
    file = read_yaml(Path(values["config"])) if values.get("config") else {}
    preset = values.get("preset") or file.get("preset")
    if preset:
        if preset not in recipe.presets:
            have = ", ".join(recipe.presets) or "none"
            raise ValueError(f"there is no preset {preset!r}{nearest(preset, recipe.presets)}; this recipe has: {have}")
        layers.append(_from_mapping(recipe.presets[preset], known, f"preset {preset}"))
    where = {**file, **values}
    resumed = _resumed_config(where.get("resume"), where.get("out"), RUNS / recipe.name)
    if resumed:
        layers.append(_from_mapping(read_yaml(resumed), known, str(resumed)))
    return layers, _from_mapping(file, known, values.get("config", ""))


def newest_run(runs: Path) -> Path | None:
    """The run under `runs` that was last worked on, of those with a checkpoint."""
    found = [p.parent for p in runs.glob("*/checkpoints") if any(p.glob("step-*"))]
    return max(found, key=lambda p: p.stat().st_mtime) if found else None


def _resumed_config(resume: str | None, out: str | None, runs: Path) -> Path | None:
    """The config.yaml of the run that `--resume` means."""
    if not resume:
        return None
    start = (Path(out) if out else newest_run(runs)) if resume in ("auto", "latest") else Path(resume)
    for folder in (start, *list(start.parents)[:2]) if start else ():
        if (folder / "config.yaml").is_file() and (folder / "receipt.json").is_file():
            return folder / "config.yaml"
    return None


def _settle_exclusive(layers: list[list[Flag]]) -> list[list[Flag]]:
    """Of two flags that exclude each other the later layer's stays; in one layer they are an error."""
    for pair in EXCLUSIVE:
        decided = False
        for i in range(len(layers) - 1, -1, -1):
            present = {name for name, _ in layers[i]} & set(pair)
            if decided:
                layers[i] = [flag for flag in layers[i] if flag[0] not in pair]
            elif len(present) == 2:
                raise ValueError(f"give --{pair[0]} or --{pair[1]}, not both")
            decided = decided or bool(present)
    return layers


def _apply_smoke(request: Request) -> None:
    """LOCKSTEP_SMOKE=N: any command, but only N steps of micro-batches of 2."""
    value = os.environ.get("LOCKSTEP_SMOKE")
    if not value:
        return
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"LOCKSTEP_SMOKE is a number of steps, at least 1, not {value!r}")
    request.smoke = int(value)
    request.train.data.batch_size = min(2, request.train.data.batch_size)
    request.train.data.global_batch_size = None
