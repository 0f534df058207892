"""The command line: which command, and how a command ends. What a command needs is imported with it."""

import atexit
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .nearest import nearest
from .usage import COMMANDS, asks_for_help, completion, help_last, help_text, show_help, version

if TYPE_CHECKING:
    from .recipe import Recipe


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command of the command line, and exit."""
    words = list(sys.argv[1:] if argv is None else argv)
    exit_with(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if not words or words in (["-h"], ["--help"], ["help"]):
        print(help_text())
        return 0
    if words[0] in ("-h", "--help", "help"):  # lockstep help train
        words = [words[1], "--help", *words[2:]]
    if words[0] in ("-V", "--version"):
        print(version())
        return 0
    name, words = words[0], words[1:]
    if name == "--completion":
        print(completion(words[0] if words else ""))
        return 0
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}{nearest(name, COMMANDS)}; see lockstep --help")
    if asks_for_help(name, words):
        show_help(name)
    # Imported here: a rank of a training run should not spend time on importing the audit.
    status: int = importlib.import_module(f".commands.{name}", __package__).run(help_last(name, words))
    return status


def train(recipe: "type[Recipe]", argv: Sequence[str] | None = None) -> None:
    """Do what `lockstep train` does, from a script of your own, and exit."""
    from . import registry
    from .commands.train import train_recipe

    flags = list(sys.argv[1:] if argv is None else argv)
    script = Path(sys.argv[0])
    if not registry.spec_of(recipe):
        registry.register_script(recipe, script)
    command = [str(script), *flags] if script.is_file() else None  # it may come from standard input
    exit_with(lambda: train_recipe(recipe, flags, command))


def exit_with(command: Callable[[], int]) -> None:
    """Run a command and exit with its status; an error is printed once, by the rank that failed first."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path that is not UTF-8 is printed as it is, byte by byte
    status = 1
    try:
        status = command()
    except ValueError as error:
        status = 2
        _report(error)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError as error:
        status = 141  # as a shell reports SIGPIPE: `| head` has read enough
        if "RANK" in os.environ:  # of another rank, perhaps
            _print_once(_explain(error))
    except SystemExit as end:  # the parser of flags, which has printed on rank 0
        status = end.code if isinstance(end.code, int) else 1
        if status and _first_to_fail():
            _record_cause("lockstep: the command line is wrong; the message above says where")
    except Exception as error:
        _print_once(_explain(error))
    _flush()
    if "RANK" in os.environ:
        # Other ranks may have exited, and nothing may wait for them any more; and gloo's threads, though the group was
        # left in order, sometimes abort the process while the interpreter shuts down.
        from . import agent, distributed

        launcher_answers = status == 0 and distributed.report_success()
        if status == 0:
            atexit._run_exitfuncs()
        agent.clean_up_after_launcher(patience=0.0 if launcher_answers else 0.2)
        os._exit(status)
    sys.exit(status)


def _flush() -> None:
    """Write out what is buffered; a stream without a reader must not change the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(error: ValueError) -> None:
    """Print what the user got wrong."""
    if "RANK" in os.environ:
        from . import distributed

        if isinstance(error, distributed.RendezvousError):  # every machine has its own reason
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _print_error(f"lockstep: {_rank()}{error}")
            return
    _print_once(f"lockstep: {error}")


def _explain(error: Exception) -> str:
    from . import distributed

    if isinstance(error, distributed.RunFailed):
        return f"{error.details}lockstep: {error}"
    lost = distributed.lost_contact(error)
    return f"lockstep: {_rank()}{lost}" if lost else f"{_rank()}{traceback.format_exc()}"


def _first_to_fail() -> bool:
    if "RANK" not in os.environ:
        return True
    from . import distributed

    return distributed.first_to_fail()


def _print_once(text: str) -> None:
    if _first_to_fail():
        _print_error(text)


def _print_error(text: str) -> None:
    _record_cause(text)
    with suppress(OSError):
        print(text, file=sys.stderr)


def _record_cause(text: str) -> None:
    if "RANK" in os.environ:
        from . import distributed

        distributed.record_cause(text)


def _rank() -> str:
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
