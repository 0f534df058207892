"""The commands of a page, each checked by the parser that will read it; nothing is run."""

import dataclasses
import importlib
import importlib.util
import itertools
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tyro
from processes import ROOT
from torch.distributed.run import get_args_parser

from lockstep import flags, registry
from lockstep.audit.command import _SWITCHES, _joined
from lockstep.commands.sample import _settings_type
from lockstep.recipe import Generates, Recipe
from lockstep.script import split_words
from lockstep.usage import COMMANDS

PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/zh/*.md"), *ROOT.glob("docs/recipes/*.md")])
BASH = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.M | re.S)
YOURS = ("train.py", "your.package", "mypackage.train")
"""What pages call a script of the reader's."""
OF_TRAIN = ("plan", "doctor", "verify")
"""Commands whose further flags are those of `lockstep train`."""
ELSEWHERE = ("srun", "sbatch")
"""Programs that this machine need not have."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page, in words; `needs` is what its block says that it needs."""

    words: tuple[str, ...]
    needs: bool


def blocks(page: str) -> list[str]:
    return BASH.findall(page)


def commands(page: str) -> list[Command]:
    """Return the commands of all blocks, without comments and variables before them."""
    found = []
    for block in blocks(page):
        needs = bool(re.search(r"# needs ", block))
        for line in block.replace("\\\n", " ").splitlines():
            found += [Command(words, needs) for words in _split(shlex.split(re.sub(r"(^|\s)#.*", "", line)))]
    return found


def _split(words: list[str]) -> list[tuple[str, ...]]:
    """Return the commands of a line, which may have several with `;` between them."""
    single: list[list[str]] = [[]]
    for word in words:
        if single[-1] or not re.match(r"[A-Z_]+=", word):
            single[-1].append(word.removesuffix(";"))
        if word.endswith(";"):
            single.append([])
    return [tuple(command) for command in single if command]


def named_files(pages: list[Path]) -> dict[str, str]:
    """Return the Python files that pages show, by the name in their first line."""
    return {name: text for page in pages for name, text in NAMED.findall(page.read_text(encoding="utf-8"))}


def check(command: Command) -> None:
    """Raise unless the command can be tried as it stands, or says what it needs."""
    program, *rest = command.words
    elsewhere = program in ELSEWHERE or "--hosts" in rest or any(word.startswith("--nnodes") for word in rest)
    assert command.needs or not elsewhere, "its block has no comment `# needs ...`"
    if program == "lockstep":
        _lockstep(rest)
    elif program == "torchrun":
        launch = get_args_parser().parse_args(rest)
        _script([*(["-m"] if launch.module else []), launch.training_script, *launch.training_script_args])
    elif program.rpartition("/")[2] == "python":
        _script(rest)
    elif program == "srun":
        _lockstep(rest[rest.index("lockstep") + 1 :])
    elif program == "sbatch":
        assert (ROOT / rest[0]).is_file()
        _lockstep(["train", *rest[1:]])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "pip":
        _extras(rest)
    else:
        assert program == "export", f"no page has used {program} so far"


def _extras(words: list[str]) -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r"\[([a-z,]+)\]", " ".join(words)):
        assert all(re.search(rf"^{extra} = \[", listed, re.M) for extra in name.split(","))


def _script(words: list[str]) -> None:
    if words[:2] == ["-m", "lockstep"]:
        _lockstep(words[2:])
        return
    name = words[1] if words[0] == "-m" else words[0]
    assert name in YOURS or (ROOT / name).is_file(), f"there is no {name}"


def _lockstep(words: list[str]) -> None:
    name, *rest = words
    if name in ("--version", "--completion"):
        return
    assert name in COMMANDS, f"there is no command {name}"
    if name in ("audit", "run"):
        own, script = split_words(rest, _SWITCHES if name == "audit" else ())
        _parse(name, _joined(own))
        _script(script)
    elif name == "train":
        named = bool(rest) and not rest[0].startswith("-")
        assert named or "--resume" in rest
        _train(rest[0] if named else "dit", rest[1:] if named else rest)
    elif name in OF_TRAIN:
        named = bool(rest) and not rest[0].startswith("-")
        assert named or name == "doctor"
        further = _parse(name, rest[1:] if named else rest, True)
        assert named or not further
        _train(rest[0] if named else "dit", further)
    elif name == "bench":
        assert rest[0] in ("gpu", "loader", "scaling")
        options = dict(itertools.pairwise(rest))
        _train(options.get("--recipe", "dit"), _parse(name, rest[1:], True))
    elif name == "data":
        assert len(rest) >= 2
        _train(rest[0], rest[2:])
    else:
        _of_runs(name, rest)


def _of_runs(name: str, rest: list[str]) -> None:
    """A command whose arguments are runs."""
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    required = len(re.findall(r"(?<![\[.])\b[A-Z_]{3,}\b", COMMANDS[name].arguments.partition("[")[0]))
    assert count >= required, f"{name} needs {COMMANDS[name].arguments}"
    if name != "recipes":
        unknown = _parse(name, rest[count:], name == "sample")
        assert {word.removeprefix("--") for word in unknown if word.startswith("--")} <= _sample_flags()


@cache
def _sample_flags() -> set[str]:
    recipes = [registry.find(name) for name in registry.installed()]
    return {"n"} | {
        field.name
        for recipe in recipes
        if issubclass(recipe, Generates)
        for field in dataclasses.fields(_settings_type(recipe(recipe.Options())))
    }


def _parse(name: str, words: list[str], has_more: bool = False) -> list[str]:
    """Parse the flags of a command, and return those that are not its own."""
    module, _, kind = COMMANDS[name].flags.partition(":")
    target: Any = getattr(importlib.import_module(module, "lockstep"), kind)
    if has_more:
        return tyro.cli(target, args=words, use_underscores=True, return_unknown_args=True)[1]
    tyro.cli(target, args=words, use_underscores=True)
    return []


def _train(spec: str, words: list[str]) -> None:
    flags.parse(_recipe(spec), words, "lockstep train")


def _recipe(spec: str) -> type[Recipe]:
    if spec == "RECIPE":
        return registry.find("dit")
    path = Path(spec.partition(":")[0])
    if path.suffix == ".py":
        needed = re.findall(r"^(?:import|from) (transformers|datasets)", path.read_text(), re.M)
        if not all(map(importlib.util.find_spec, needed)):
            pytest.skip(f"{path} needs {needed}")
    return registry.find(spec)


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `folder` the working directory, with the files that pages name."""
    for name, text in named_files([*PAGES, ROOT / "README.md"]).items():
        (folder / name).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("LOCKSTEP_SMOKE", raising=False)
