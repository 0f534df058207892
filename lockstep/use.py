"""Use what was trained: `lockstep sample RUN`, `lockstep test RUN`."""

import dataclasses
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import nn

from . import checkpoint, config, distributed, evaluate, launch, precision, recipe
from .config import Hardware


@dataclass
class Use:
    """Which run, which of its weights, and on what."""

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

    def hardware(self) -> Hardware:
        return Hardware(nproc=self.nproc, device=self.device)


@dataclass
class Trained:
    """A run, opened."""

    folder: Path
    recipe: recipe.Recipe
    checkpoint: checkpoint.Checkpoint
    averages: tuple[float, ...]
    """Decays of its averaged weights, the one that counts first."""


def _open(path: Path, which: str) -> Trained:
    """The recipe and the checkpoint of a run folder, or of a checkpoint inside one."""
    where = checkpoint.resolve(path)
    folder = where.parent.parent if checkpoint.is_checkpoint(where) else where.parent
    if not (folder / "receipt.json").is_file():
        raise ValueError(f"{folder} is not a run's folder: it has no receipt.json")
    found = recipe.find(json.loads((folder / "receipt.json").read_text())["spec"])
    request = config.parse(found, ["--config", str(folder / "config.yaml")], "lockstep")
    chosen: checkpoint.Checkpoint | None
    if checkpoint.is_checkpoint(where):
        chosen = checkpoint.load(where)
    elif which == "last":
        chosen = checkpoint.newest(where, lambda text: print(text, file=sys.stderr))  # noqa: T201
    else:
        chosen = checkpoint.load(where / which)
    if chosen is None:
        raise ValueError(f"there is no good checkpoint in {where}")
    return Trained(folder, found(request.options), chosen, request.train.optim.ema_decay)


def _model(trained: Trained, weights: str) -> tuple[nn.Module, str]:
    """The model with the weights asked for, and which these are."""
    averages = [f"ema-{decay}" for decay in trained.averages]
    if weights == "ema" and not averages:
        raise ValueError(f"{trained.checkpoint.path} has no averaged weights; use --weights plain")
    name = averages[0] if averages and weights != "plain" else "model"
    model = trained.recipe.model()
    checkpoint.restore_model(model, trained.checkpoint.tensors[name], str(trained.checkpoint.path))
    return model, "plain" if name == "model" else "ema"


def _run_path(words: list[str], command: str) -> Path:
    if not words or words[0].startswith("-"):
        raise ValueError(f"say which run: lockstep {command} RUN [flags]")
    return Path(words[0])


def sample(words: list[str]) -> int:
    """Generate n samples on all ranks and write them as the recipe does."""
    path = _run_path(words, "sample")
    opened = _open(path, "last")
    settings_type = _settings(opened.recipe)
    target = dataclasses.make_dataclass(
        "Sample", [("n", int, 64), ("settings", settings_type, dataclasses.field(default_factory=settings_type)),
                   ("use", Use, dataclasses.field(default_factory=Use))],
    )  # fmt: skip
    flags: Any = tyro.cli(
        target, args=words[1:], prog="lockstep sample RUN", use_underscores=True, config=(tyro.conf.OmitArgPrefixes,)
    )
    use: Use = flags.use
    if flags.n < 1:
        raise ValueError(f"n is at least 1, not {flags.n}")
    nproc = launch.processes(use.hardware())
    if nproc > 1:
        return launch.start(nproc, ["-m", "lockstep", "sample", *words])
    if use.checkpoint != "last":
        opened = _open(path, use.checkpoint)
    settings = dataclasses.asdict(flags.settings)
    with distributed.session(use.hardware()) as world:
        how = precision.choose(use.hardware(), world.device)
        model, weights = _model(opened, use.weights)
        model.to(world.device)
        samples = evaluate.generate(opened.recipe, model, flags.n, settings, world, how.autocast, use.seed)
        if samples is not None:
            folder = Path(use.out) if use.out else opened.folder / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            details = "".join(f"-{k}{v:g}" for k, v in settings.items() if isinstance(v, int | float))
            name = f"step-{opened.checkpoint.step:08d}-n{flags.n}{details}-seed{use.seed}-{weights}"
            for made in opened.recipe.save_samples(samples, folder / name):
                print(made)  # noqa: T201
    return 0


def _settings(of: recipe.Recipe) -> type:
    """The keyword arguments of a recipe's `sample`, as flags."""
    parameters = list(inspect.signature(of.sample).parameters.values())[3:]
    fields: list[Any] = [
        (p.name, p.annotation, p.default) for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return dataclasses.make_dataclass("settings", fields)


def test(words: list[str]) -> int:
    """The recipe's metrics on its test set, the same on any number of ranks."""
    path = _run_path(words, "test")
    use = tyro.cli(Use, args=words[1:], prog="lockstep test RUN", use_underscores=True)
    nproc = launch.processes(use.hardware())
    if nproc > 1:
        return launch.start(nproc, ["-m", "lockstep", "test", *words])
    opened = _open(path, use.checkpoint)
    data = opened.recipe.dataset("test")
    if data is None:
        raise ValueError("this recipe's data have no test set")
    with distributed.session(use.hardware()) as world:
        how = precision.choose(use.hardware(), world.device)
        model, _ = _model(opened, use.weights)
        model.to(world.device)
        values = evaluate.evaluate(opened.recipe, model, data, world, use.batch_size, how.autocast, use.seed)
        if world.is_main:
            folder = Path(use.out) if use.out else opened.folder / "test"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.json").write_text(json.dumps(values, indent=2) + "\n")
            for name, value in values.items():
                print(f"{name} {value:.6g}")  # noqa: T201
    return 0
