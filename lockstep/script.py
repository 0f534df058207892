"""A training script of the user's, run unchanged: how it is named on a command line, and run as Python would."""

import ast
import importlib.util
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path


def split_words(words: list[str], switches: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Return the flags of a command, and the script with its own; a `--` between them may be left out. No value follows
    `switches`."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("--", "-m"):
        takes_value = words[i].startswith("--") and "=" not in words[i] and words[i] not in ("--help", *switches)
        i += 2 if takes_value else 1
    return words[:i], words[i + 1 :] if words[i : i + 1] == ["--"] else words[i:]


def check(script: list[str], command: str) -> None:
    """Raise a ValueError unless the words after the flags of a command name a script or a module."""
    if not script:
        raise ValueError(
            f"nothing to {command}: lockstep {command} [flags] train.py [its flags], or -m module [its flags]"
        )
    if script[0] == "-m":
        if len(script) < 2:
            raise ValueError("-m needs the name of a module")
    elif not Path(script[0]).is_file():
        raise ValueError(f"no script {script[0]!r} in {Path.cwd()}")


def run_as_main(script: list[str]) -> None:
    """Run a script or a module in this process, as `__main__` and with its own `sys.argv`."""
    is_module = script[0] == "-m"
    name, flags = (script[1], script[2:]) if is_module else (script[0], script[1:])
    sys.path.insert(0, str(Path.cwd() if is_module else Path(name).resolve().parent))
    sys.argv = [name, *_local_rank_flag(script), *flags]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def _local_rank_flag(script: list[str]) -> list[str]:
    """Return --local_rank as torch.distributed.launch passes it, for a script that declares it."""
    flags = ("--local_rank", "--local-rank")
    declared = declared_flag(_file_of(script), flags)
    given = any(word.startswith(flags) for word in script)
    return [f"{declared}={os.environ['LOCAL_RANK']}"] if declared and not given else []


def _file_of(script: list[str]) -> str:
    if script[0] != "-m":
        return script[0]
    with suppress(ImportError, ValueError):  # runpy reports a module that does not exist
        spec = importlib.util.find_spec(script[1])
        if spec and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{script[1]}.__main__")
        return spec.origin or "" if spec else ""
    return ""


def declared_flag(file: str, flags: tuple[str, ...]) -> str | None:
    """Return which of `flags` a script's parser declares."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node.func) in ("add_argument", "option"):
            found = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value in flags]
            if found:
                return str(found[0])
    return None


def _called(function: ast.AST) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None
