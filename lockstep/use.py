"""What was trained, in use: `lockstep sample | test | predict RUN`; and `lockstep data`, something to train on."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import nn

from . import checkpoint, distributed, evaluate, launch, precision, recipe
from .config import Hardware
from .distributed import World
from .flags import parse


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
    model: nn.Module
    step: int
    weights: str
    """Whether the model has `plain` or averaged (`ema`) weights."""


def _folder(path: Path) -> Path:
    """The run's folder that `path` is, or is a part of."""
    where = checkpoint.resolve(path)
    folder = where.parent.parent if checkpoint.is_checkpoint(where) else where.parent
    if not (folder / "receipt.json").is_file():
        raise ValueError(f"{folder} is not a run's folder: it has no receipt.json")
    return folder


def recipe_of(path: Path) -> recipe.Recipe:
    """The recipe that a run was made with, with its options."""
    folder = _folder(path)
    found = recipe.find(json.loads((folder / "receipt.json").read_text())["spec"])
    return found(parse(found, ["--config", str(folder / "config.yaml")], "lockstep").options)


def load(path: Path, which: str, weights: str = "auto", world: World | None = None) -> Trained:
    """A run, or one of its checkpoints, with its model; rank 0 chooses which checkpoint, for all of them."""
    world = world or World()
    where, folder = checkpoint.resolve(path), _folder(path)
    chosen = world.decide(lambda: _choose(where, which))
    start = checkpoint.load(chosen)
    averages = [name for name in start.tensors if name.startswith("ema-")]
    settings = parse(type(made := recipe_of(path)), ["--config", str(folder / "config.yaml")], "lockstep").train
    if weights == "ema" and not averages:
        raise ValueError(f"{chosen} has no averaged weights; use --weights plain")
    name = f"ema-{settings.optim.ema_decay[0]}" if averages and weights != "plain" else "model"
    model = made.model()
    checkpoint.restore_model(model, start.tensors[name], str(chosen))
    return Trained(folder, made, model.to(world.device), start.step, "plain" if name == "model" else "ema")


def _choose(where: Path, which: str) -> Path:
    if checkpoint.is_checkpoint(where):
        return where
    if which != "last":
        return where / which
    newest = checkpoint.newest(where, lambda text: print(text, file=sys.stderr))  # noqa: T201
    if newest is None:
        raise ValueError(f"there is no good checkpoint in {where}")
    return newest.path


def _run_path(words: list[str], command: str) -> Path:
    if not words or words[0].startswith("-"):
        raise ValueError(f"say which run: lockstep {command} RUN [flags]")
    return Path(words[0])


def _shared(words: list[str], use: Use, act: Callable[[World, Any], None]) -> int:
    """Do it on all ranks that are asked for, starting them if need be; `words` are the command."""
    nproc = launch.processes(use.hardware())
    if nproc > 1:
        return launch.start(nproc, ["-m", "lockstep", *words])
    with distributed.session(use.hardware()) as world:
        act(world, precision.choose(use.hardware(), world.device).autocast)
    return 0


def _say(made: list[Path]) -> None:
    for path in made:
        print(path)  # noqa: T201


def sample(words: list[str]) -> int:
    """Generate n samples on all ranks and write them as the recipe does."""
    path = _run_path(words, "sample")
    settings_type = _settings(recipe_of(path))
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
    settings = dataclasses.asdict(flags.settings)

    def act(world: World, autocast: Any) -> None:
        run = load(path, use.checkpoint, use.weights, world)
        samples = evaluate.generate(run.recipe, run.model, flags.n, settings, world, autocast, use.seed, use.batch_size)
        if samples is not None:
            folder = Path(use.out) if use.out else run.folder / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            details = "".join(f"-{k}{v:g}" for k, v in settings.items() if isinstance(v, int | float))
            name = f"step-{run.step:08d}-n{flags.n}{details}-seed{use.seed}-{run.weights}"
            _say(run.recipe.save_samples(samples, folder / name))

    return _shared(["sample", *words], use, act)


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

    def act(world: World, autocast: Any) -> None:
        run = load(path, use.checkpoint, use.weights, world)
        data = run.recipe.dataset("test")
        if data is None:
            raise ValueError("this recipe's data have no test set")
        values, sums = evaluate.evaluate(
            run.recipe, run.model, data, world, use.batch_size, autocast, use.seed, of_batch=run.recipe.test_batch
        )
        if world.is_main:
            folder = Path(use.out) if use.out else run.folder / "test"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.json").write_text(json.dumps(values, indent=2) + "\n")
            for name, value in values.items():
                print(f"{name} {value:.6g}")  # noqa: T201
            _say([folder / "metrics.json", *run.recipe.save_test(sums, values, folder)])

    return _shared(["test", *words], use, act)


def predict(words: list[str]) -> int:
    """What the model says about a file or a folder, in the order of the input on any number of ranks."""
    path = _run_path(words, "predict")
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError("say what to predict: lockstep predict RUN FILE_OR_FOLDER [flags]")
    source = Path(words[1])
    use = tyro.cli(Use, args=words[2:], prog="lockstep predict RUN FILE_OR_FOLDER", use_underscores=True)
    if not source.exists():
        raise ValueError(f"there is nothing to predict at {source}")

    def act(world: World, autocast: Any) -> None:
        run = load(path, use.checkpoint, use.weights, world)
        data = run.recipe.inputs(source)
        predictions = evaluate.predict(run.recipe, run.model, data, world, use.batch_size, autocast)
        if world.is_main:
            folder = Path(use.out) if use.out else run.folder / "predict"
            folder.mkdir(parents=True, exist_ok=True)
            _say(run.recipe.save_predictions(predictions, data, folder))

    return _shared(["predict", *words], use, act)


def data(words: list[str]) -> int:
    """Write a recipe's embedded data in its field's own files: lockstep data RECIPE FOLDER [the recipe's flags]."""
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise ValueError("say which data, and where to: lockstep data RECIPE FOLDER")
    found, folder = recipe.find(words[0]), Path(words[1])
    options = parse(found, words[2:], f"lockstep data {words[0]} FOLDER").options
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    print(found(options).write_data(folder))  # noqa: T201
    return 0
