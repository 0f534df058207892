"""The command line: a table of commands, and how a command ends."""

import atexit
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import distributed, registry
from .recipe import Recipe


@dataclass(frozen=True)
class Command:
    """A command of `lockstep`; it is in the file of its name in `commands/`."""

    arguments: str
    summary: str


COMMANDS = {
    "recipes": Command("", "list the recipes"),
    "train": Command("RECIPE [flags]", "train; RECIPE is a name or file.py:Class; --help lists its flags"),
    "sample": Command("RUN [--n 64 ...]", "generate with what was trained"),
    "test": Command("RUN [flags]", "metrics on the test set"),
    "predict": Command("RUN PATH [flags]", "predict for a file or a folder"),
    "data": Command("RECIPE FOLDER", "write a recipe's embedded data in the file formats of its field"),
    "verify": Command("RECIPE [flags]", "show that one rank and many train the same model"),
    "replay": Command("RUN --step N [--samples]", "redo one step of a run, and see its samples"),
    "bisect": Command("RUN_A RUN_B [flags]", "compare two runs: where they part, and why"),
    "audit": Command("-- SCRIPT [flags]", "find the silent distributed bugs of any training script"),
}


def help_text() -> str:
    """Return what `lockstep --help` prints."""
    usages = {f"lockstep {name} {command.arguments}".strip(): command.summary for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    return "\n".join(f"{usage:{width}}  {summary}" for usage, summary in usages.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command of the command line, and exit."""
    words = list(sys.argv[1:] if argv is None else argv)
    exit_with(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}{registry.nearest(name, COMMANDS)}; see lockstep --help")
    # Imported here: a rank of a training run should not spend time on importing the audit.
    status: int = importlib.import_module(f".commands.{name}", __package__).run(words[1:])
    return status


def train(recipe: type[Recipe], argv: Sequence[str] | None = None) -> None:
    """Do what `lockstep train` does, from a script of your own, and exit."""
    from .commands.train import train_recipe

    flags = list(sys.argv[1:] if argv is None else argv)
    script = Path(sys.argv[0])
    if not registry.spec_of(recipe):
        registry.register_script(recipe, script)
    exit_with(lambda: train_recipe(recipe, flags, [str(script), *flags]))


def exit_with(command: Callable[[], int]) -> None:
    """Run a command and exit with its status; an error is printed once, by the rank that failed first."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path that is not UTF-8 is printed as it is, byte by byte
    status = 1
    try:
        status = command()
    except distributed.RendezvousError as error:
        status = 2
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"lockstep: {_rank()}{error}", file=sys.stderr)
    except ValueError as error:
        status = 2
        _print_once(f"lockstep: {error}")
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # the parser of flags, which has printed on rank 0
        status = end.code if isinstance(end.code, int) else 1
        if status:
            distributed.first_to_fail()
    except Exception as error:
        _print_once(_explain(error))
    _flush()
    if "RANK" in os.environ:
        # Other ranks may have exited, and nothing may wait for them any more; and gloo's threads, though the group was
        # left in order, sometimes abort the process while the interpreter shuts down.
        launcher_answers = status == 0 and distributed.report_success()
        if status == 0:
            atexit._run_exitfuncs()
        distributed.remove_folder_of_dead_launcher(patience=0.0 if launcher_answers else 0.2)
        os._exit(status)
    sys.exit(status)


def _flush() -> None:
    """Write out what is buffered; a stream without a reader must not change the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(error: Exception) -> str:
    if isinstance(error, distributed.RunFailed):
        return f"{error.details}lockstep: {error}"
    lost = distributed.lost_contact(error)
    return f"lockstep: {_rank()}{lost}" if lost else f"{_rank()}{traceback.format_exc()}"


def _print_once(text: str) -> None:
    if distributed.first_to_fail():
        with suppress(OSError):
            print(text, file=sys.stderr)


def _rank() -> str:
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
