"""What the command line prints about itself: help, version, completion. Help imports no torch, so that it is quick."""

import importlib
import io
import platform
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from . import __version__

HELP = ("-h", "--help")


@dataclass(frozen=True)
class Command:
    """A command of `lockstep`; it is in the file of its name in `commands/`."""

    arguments: str
    summary: str
    flags: str = ""
    """module:dataclass of its flags."""
    more: str = ""
    """Which flags it has besides."""


COMMANDS = {
    "recipes": Command("", "list the recipes"),
    "train": Command(
        "RECIPE [flags]",
        "train; RECIPE is a name or file.py:Class; --help lists its flags",
        ".config:TrainConfig",
        "A recipe has flags and defaults of its own: lockstep train RECIPE --help. With --resume RUN, the recipe need "
        "not be named.",
    ),
    "sample": Command(
        "RUN [--n 64 ...]",
        "generate with what was trained",
        ".options:UseFlags",
        "--n is how many. A recipe has flags of its own: lockstep sample RUN --help.",
    ),
    "test": Command("RUN [flags]", "metrics on the test set", ".options:UseFlags"),
    "predict": Command("RUN PATH [flags]", "predict for a file or a folder", ".options:UseFlags"),
    "export": Command(
        "RUN --to hf|safetensors|dcp [--ema]", "the weights of a run for other programs", ".options:ExportFlags"
    ),
    "data": Command(
        "RECIPE FOLDER",
        "write a recipe's embedded data in the file formats of its field",
        more="A recipe may have flags for it: lockstep data RECIPE --help.",
    ),
    "verify": Command(
        "RECIPE [flags]",
        "show that one rank and many train the same model",
        ".options:Verify",
        "Further flags are those of lockstep train.",
    ),
    "replay": Command(
        "RUN --step N [--samples]", "redo one step of a run, and see its samples", ".options:ReplayFlags"
    ),
    "bisect": Command("RUN_A RUN_B [flags]", "compare two runs: where they part, and why", ".options:BisectFlags"),
    "report": Command(
        "RUN [RUN ...] [--out FILE]",
        "one HTML page about a run: curves, where the time went, samples, checks",
        ".options:ReportFlags",
        "With several runs, their curves and settings stand side by side.",
    ),
    "top": Command(
        "[RUN]",
        "all ranks of a running job, live; by default of the run that was started last",
        ".options:TopFlags",
    ),
    "run": Command(
        "[--nproc N] SCRIPT [flags]",
        "run a training script as it is: torchrun, with a watch for hangs and for weights that differ",
        ".options:RunScript",
        "Flags of lockstep run come before SCRIPT (or -m MODULE), those of the script after it.",
    ),
    "doctor": Command(
        "[RECIPE] [flags]",
        "check this machine, and with a RECIPE what limits its speed",
        ".options:DoctorFlags",
        "The exit status is 1 if a check is red. With a RECIPE, further flags are those of lockstep train.",
    ),
    "plan": Command(
        "RECIPE [flags]",
        "memory, step time and days on GPUs that you do not have yet",
        ".options:PlanFlags",
        "Needs no GPU, and trains nothing. Further flags are those of lockstep train.",
    ),
    "bench": Command(
        "gpu|loader|scaling [flags]",
        "measure speed beside plain PyTorch, Accelerate, Lightning and Fabric; the cost of data; several CPU ranks",
        ".options:Bench",
        "Further flags are those of lockstep train. lockstep bench scaling has --recipes, --nproc, --steps, --rounds "
        "and --json.",
    ),
    "audit": Command(
        "SCRIPT [flags]",
        "find the silent distributed bugs of any training script",
        ".options:Audit",
        "Flags of the audit come before SCRIPT (or -m MODULE), those of the script after it.",
    ),
}
_OF_RECIPE = ("train", "sample", "data")
"""Commands whose --help, after their argument, has the flags of a recipe."""
SHELLS = ("bash", "zsh")


def help_text() -> str:
    """Return what `lockstep --help` prints."""
    usages = {f"lockstep {name} {command.arguments}".strip(): command.summary for name, command in COMMANDS.items()}
    usages |= {
        "lockstep COMMAND --help": "the flags of a command",
        "lockstep --version": "versions of Lockstep, Python, torch, CUDA and NCCL",
        f"lockstep --completion {'|'.join(SHELLS)}": "print a completion script for the shell",
    }
    width = max(map(len, usages))
    return "\n".join(f"{usage:{width}}  {summary}" for usage, summary in usages.items())


def asks_for_help(name: str, words: list[str]) -> bool:
    """Return whether the general help of a command is asked for, rather than that of a recipe or an audited script."""
    if name in ("audit", "run"):
        return words[:1] != [] and words[0] in HELP
    named = any(not word.startswith("-") for word in words)
    return any(word in HELP for word in words) and not (named and name in _OF_RECIPE)


def help_last(name: str, words: list[str]) -> list[str]:
    """Return the words with --help after the argument, wherever it was."""
    if name not in _OF_RECIPE or not any(word in HELP for word in words):
        return words
    return [*(word for word in words if word not in HELP), "--help"]


def show_help(name: str) -> None:
    """Print the help of a command."""
    command = COMMANDS[name]
    text = f"{command.summary[0].upper()}{command.summary.partition(';')[0][1:]}. {command.more}".strip()
    module, _, flags = (command.flags or ".usage:_NoFlags").partition(":")
    kind = getattr(importlib.import_module(module, __package__), flags)
    prog = f"lockstep {name} {command.arguments.partition(' [')[0].partition(' --')[0]}".strip()
    config = (tyro.conf.OmitArgPrefixes,)
    tyro.cli(kind, args=["--help"], prog=prog, description=text, use_underscores=True, config=config)


@dataclass
class _NoFlags:
    """A command without flags."""


def version() -> str:
    """Return the versions that matter to a bug report."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    versions = {
        "lockstep": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": nccl,
        "GPUs": ", ".join(gpus) or "none",
    }
    return "\n".join(f"{name:9} {value}" for name, value in versions.items())


def completion(shell: str) -> str:
    """Return a script with which a shell completes commands, recipes, flags, their values, and else files."""
    if shell not in SHELLS:
        raise ValueError(f"--completion is for one of {', '.join(SHELLS)}, not {shell!r}")
    commands: Any = Union[tuple(_subcommand(name, _completed(name)) for name in COMMANDS)]  # noqa: UP007
    words, config = ["--tyro-print-completion", shell], (tyro.conf.OmitArgPrefixes,)
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(commands, args=words, prog="lockstep", use_underscores=True, config=config)
    return printed.getvalue().replace("complete -F", "complete -o default -F")


def _subcommand(name: str, kind: Any) -> Any:
    return Annotated[kind, tyro.conf.subcommand(name)]


def _completed(name: str) -> Any:
    """Return the type of what follows a command: its flags, or one set of flags for each recipe."""
    from . import flags, registry

    if name not in ("train", "verify", "data"):
        module, _, kind = (COMMANDS[name].flags or ".usage:_NoFlags").partition(":")
        return getattr(importlib.import_module(module, __package__), kind)
    recipes = [(recipe, flags.all_flags(registry.find(recipe))) for recipe in sorted(registry.installed())]
    return Union[tuple(_subcommand(recipe, kind) for recipe, kind in recipes)]  # noqa: UP007
