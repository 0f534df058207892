"""Command line to settings: the command line, a YAML file, a preset and a recipe's defaults are all lists of flags.

All of them go through one parser, in this order, and the last one wins:

    the recipe's defaults, --preset NAME, the run that is resumed, --config FILE, the command line

so `batch_size: 64` in a file means exactly what `--batch_size 64` means. Flags that exclude each other (`n_steps` and
`epochs`) may stand in different places, where the later one wins, but not in the same one.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
import yaml

from .config import EXCLUSIVE, TrainConfig
from .files import write_text
from .nearest import nearest
from .recipe import Recipe

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
    "project": "wandb_project",
    "run_name": "wandb_name",
}
"""Other names that guides and scripts use for a flag."""

MAX_YAML = 200_000
"""Characters of a settings file. Those of a run have two thousand; a larger one would take long to parse."""
Flag = tuple[str, list[str]]
"""A flag's name and its words as typed: ("batch_size", ["--batch_size", "64"])."""
FindConfig = Callable[[str, str | None, type[Recipe]], Path | None]
"""find_config(resume, out, recipe): the config.yaml of the run that `--resume` names."""


@dataclass
class Request:
    """What the user asked for: settings, the recipe's options, and which of them the user gave."""

    recipe: type[Recipe]
    train: TrainConfig
    options: Any
    given: frozenset[str] = frozenset()
    smoke: int | None = None
    instance: Recipe | None = None
    """The recipe itself, where a library call gave one; else it is made from the options."""

    def flat(self) -> dict[str, Any]:
        """Return every setting by flag name, as a YAML file would hold it."""
        groups = [self.options, *(getattr(self.train, f.name) for f in dataclasses.fields(self.train))]
        return {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}

    def settings(self) -> dict[str, Any]:
        """Return what a later launch of the run needs: every setting but unset ones and those of this launch alone."""
        this_launch = {"resume", "config", "preset", "out", "nproc", "local_rank", "world_size"}
        settings = {k: v for k, v in self.flat().items() if v is not None and k not in this_launch}
        for winner, loser in EXCLUSIVE:
            if winner in settings:
                settings.pop(loser, None)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}

    def write(self, path: Path) -> None:
        """Write the settings as a file that `--config` reads."""
        write_text(path, yaml.safe_dump(self.settings(), sort_keys=False))


def parse(recipe: type[Recipe], argv: Sequence[str], prog: str, find_config: FindConfig = lambda *_: None) -> Request:
    """Return the settings that `argv` and the files it names ask for."""
    target = all_flags(recipe)
    known = Known.of(recipe, target)
    defaults: Any = tyro.cli(
        target, args=_words(_from_mapping(recipe.defaults, known, recipe.__name__)), config=(tyro.conf.OmitArgPrefixes,)
    )
    typed = _split(argv, known)
    below, file = _files(recipe, typed, known, find_config)
    layers = _resolve_exclusive([*below, file, typed])
    for winner, loser in (*EXCLUSIVE, *((b, a) for a, b in EXCLUSIVE)):
        if any(name == winner for layer in layers for name, _ in layer):
            _reset(defaults, loser)
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


def request_for(
    recipe: type[Recipe],
    config: TrainConfig | None,
    settings: Mapping[str, Any],
    find_config: FindConfig = lambda *_: None,
) -> Request:
    """Return the request of a library call: a whole `config`, or settings by flag name over the recipe's defaults."""
    if config is not None and settings:
        raise ValueError(f"give a config or single settings, not both: {', '.join(settings)}")
    if config is not None:
        return Request(recipe, config, recipe.Options())
    known = Known.of(recipe, all_flags(recipe))
    words = _words(_from_mapping(settings, known, f"fit({recipe.__name__})"))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            request = parse(recipe, words, "fit", find_config)
    except SystemExit:  # the parser exits after printing what is wrong, in a box
        text = " ".join(printed.getvalue().translate(dict.fromkeys(map(ord, "╭╮╰╯─│"), " ")).split())
        raise ValueError(text.partition("Argument helptext")[0].partition("For full helptext")[0].strip()) from None
    return request


def _group(recipe: type[Recipe]) -> str:
    """Return the name of the recipe's group of flags: its own name, or `recipe`."""
    name = recipe.name
    return name if name.isidentifier() and name not in {f.name for f in dataclasses.fields(TrainConfig)} else "recipe"


def all_flags(recipe: type[Recipe]) -> type:
    """Return a dataclass of all flags: the recipe's own first."""
    options = (_group(recipe), _described(recipe.Options), field(default_factory=recipe.Options))
    engine = [
        (f.name, _described(f.type), field(default_factory=f.default_factory)) for f in dataclasses.fields(TrainConfig)
    ]
    return dataclasses.make_dataclass("Flags", [options, *engine])


def _described(group: Any) -> Any:
    """Return the type of a group of flags with its heading in --help, its docstring.

    The parser would look for one in the source of the class `Flags`, which has none: most of the time of parsing.
    """
    doc = inspect.cleandoc(group.__doc__ or "")
    generated = doc.startswith(f"{group.__name__}(")  # by @dataclass, for a class without a docstring
    return Annotated[group, tyro.conf.arg(help="" if generated else doc)]


@dataclass(frozen=True)
class Known:
    """All flags of a recipe and the engine."""

    flags: dict[str, bool]
    """By name, whether it is a boolean."""
    texts: frozenset[str]
    """Flags whose value is a text, which may be empty."""
    aliases: Mapping[str, str]
    removed: frozenset[str]
    """Options of older versions; the config.yaml of an old run may hold them."""

    @classmethod
    def of(cls, recipe: type[Recipe], target: type) -> "Known":
        groups = [get_args(f.type)[0] for f in dataclasses.fields(target)]
        types = {f.name: f.type for group in groups for f in dataclasses.fields(group)}
        flags = {name: kind is bool for name, kind in types.items()}
        texts = frozenset(name for name, kind in types.items() if kind is str)
        return cls(flags, texts, {**ALIASES, **recipe.aliases}, recipe.removed_options)

    def canonical(self, name: str) -> str:
        name = name.replace("-", "_")
        return name if name in self.flags else self.aliases.get(name, name)


def _reset(defaults: Any, name: str) -> None:
    """Set a setting to the engine's default, because the user gave the one that excludes it."""
    for group in (getattr(defaults, f.name) for f in dataclasses.fields(defaults)):
        for f in dataclasses.fields(group):
            if f.name == name:
                setattr(group, name, f.default)


def _split(argv: Sequence[str], known: Known) -> list[Flag]:
    """Return command-line words grouped by flag, under their canonical names."""
    flags: list[Flag] = []
    for word in argv:
        if not word.startswith("--") or word == "--":
            flags[-1:] = [(flags[-1][0], [*flags[-1][1], word])] if flags else [("", [word])]
            continue
        name, equals, value = word[2:].partition("=")
        negated = name.replace("-", "_").removeprefix("no_")
        name, positive = known.canonical(name), known.canonical(negated)
        if known.flags.get(positive):
            name = positive if name == positive else f"no_{positive}"
        flags.append((positive if known.flags.get(positive) else name, [f"--{name}{equals}{value}"]))
    return flags


def _words(flags: Iterable[Flag]) -> list[str]:
    return [word for _, words in flags for word in words]


def _from_mapping(mapping: Mapping[str, Any], known: Known, source: str) -> list[Flag]:
    """Return the settings of a YAML file or a preset as flags."""
    flags: list[Flag] = []
    for key, value in _leaves(mapping, known):
        name = known.canonical(key)
        if name not in known.flags:
            raise ValueError(f"{source}: there is no setting {key!r}{nearest(name, known.flags)}")
        if isinstance(value, list | tuple) and any(isinstance(x, list | tuple | Mapping) for x in value):
            # Before anything else: a few lines of YAML with aliases may stand for terabytes, once they are spelt out.
            raise ValueError(f"{source}: {key} is a list of single values, not of lists")
        if isinstance(value, Mapping):
            raise ValueError(f"{source}: {key} is one value, not a group of settings")
        if known.flags[name]:
            yes = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
            if str(value).lower() not in yes:
                raise ValueError(f"{source}: {key} is true or false, not {value!r}")
            flags.append((name, [f"--{name}" if yes[str(value).lower()] else f"--no_{name}"]))
        elif isinstance(value, list | tuple):
            flags.append((name, [f"--{name}", *map(str, value)]))
        else:
            nothing = value in (None, "null", "~") or (value == "" and name not in known.texts)
            flags.append((name, [f"--{name}", "None" if nothing else str(value)]))
    return flags


def _leaves(mapping: Mapping[str, Any], known: Known) -> Iterable[tuple[str, Any]]:
    """Key and value; those of a group that some alias names (`ddp.enabled`) one by one, with a dot."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and any(alias.startswith(f"{key}.") for alias in known.aliases):
            yield from ((f"{key}.{inner}", x) for inner, x in value.items())
        else:
            yield str(key), value


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the settings of a file; values stay strings, the parser of the flags converts them."""
    try:
        text = path.read_text()
        if len(text) > MAX_YAML:
            raise ValueError(f"{path} has {len(text):,} characters; a file of settings has at most {MAX_YAML:,}")
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: it is a list of `flag: value` lines") from None
    if not isinstance(content or {}, Mapping):
        raise ValueError(f"{path} is a list of `flag: value` lines, not a {type(content).__name__}")
    return content or {}


def _read_config(path: Path, known: Known) -> Mapping[str, Any]:
    """Return the settings of a file; of a run's own config.yaml without options that no longer exist."""
    settings = read_yaml(path)
    if path.name == "config.yaml" and (path.parent / "receipt.json").is_file():
        return {key: value for key, value in settings.items() if key not in known.removed}
    return settings


def _check_not_edited(path: Path, known: Known, given: set[str]) -> None:
    """Raise a ValueError if a run's config.yaml is not as it was written, but for settings that the user has `given`.

    A run that goes on with other settings by accident is wrong without a sign of it; its receipt has what it wrote.
    """
    try:
        settings = json.loads((path.parent / "receipt.json").read_text())["settings"]
        written = yaml.load(yaml.safe_dump(settings), Loader=yaml.BaseLoader).items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return  # the receipt is damaged, or of a version that did not record its settings
    found = read_yaml(path).items()
    old, new = (
        _undecided((pair for pair in a if pair not in b), known, given) for a, b in ((written, found), (found, written))
    )
    if not old and not new:
        return
    changes = [f"{key} is {new.get(key, 'missing')}, was {old.get(key, 'not set')}" for key in {**old, **new}]
    remedies = [
        f"{shlex.join(_words(_from_mapping(pairs, known, str(path))))} to {how}"
        for pairs, how in ((new, "use what is in the file"), (old, "keep what the run had"))
        if pairs
    ]
    raise ValueError(
        f"{path} was edited since the run wrote it: {'; '.join(changes)}. Settings of a run change on the command "
        f"line: add {', or '.join(remedies)}"
    )


def _undecided(pairs: Iterable[tuple[str, Any]], known: Known, given: set[str]) -> dict[str, Any]:
    """Return the settings that the user has not given, nor another one that excludes them."""
    decided = given | {other for pair in EXCLUSIVE for other in pair if given & set(pair)}
    return {key: value for key, value in pairs if known.canonical(key) not in decided and key not in known.removed}


def _files(
    recipe: type[Recipe], typed: list[Flag], known: Known, find_config: FindConfig
) -> tuple[list[list[Flag]], list[Flag]]:
    """Return the layers that the command line names: those of preset and resumed run, and that of the config file."""
    config = _values(typed).get("config")
    file = _from_mapping(_read_config(Path(config), known), known, config) if config else []
    values, layers = _values([*file, *typed]), []
    if preset := values.get("preset"):
        if preset not in recipe.presets:
            have = ", ".join(recipe.presets) or "none"
            raise ValueError(f"there is no preset {preset!r}{nearest(preset, recipe.presets)}; this recipe has: {have}")
        layers.append(_from_mapping(recipe.presets[preset], known, f"preset {preset}"))
    resume = values.get("resume")
    if resume and (resumed := find_config(resume, values.get("out"), recipe)):
        _check_not_edited(resumed, known, {name for name, _ in [*file, *typed]})
        layers.append(_from_mapping(_read_config(resumed, known), known, str(resumed)))
    return layers, file


def _values(flags: Iterable[Flag]) -> dict[str, str]:
    """Return the value of each flag that has one; the last of several."""
    pairs = ((name, words[0].partition("=")[2] if "=" in words[0] else " ".join(words[1:])) for name, words in flags)
    return {name: value for name, value in pairs if value not in ("", "None")}


def _resolve_exclusive(layers: list[list[Flag]]) -> list[list[Flag]]:
    """Keep, of two flags that exclude each other, that of the later layer; in one layer they are an error."""
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
