"""The flags with which a script resumes, or is told its batch size: given by the user, or read from its parser."""

import ast
import os
import re
import shlex
from pathlib import Path

from ..source import parsed

_RESUMES = re.compile(
    r"--(auto[-_])?(resume|restore|continue)([-_](from|training|path|checkpoint|ckpt|from[-_]checkpoint|run))*"
    r"|--(load|from|init[-_]from)[-_](checkpoint|ckpt|snapshot)([-_]path)?",
    re.IGNORECASE,
)


def resume_words(argv: list[str], given: str | None, checkpoint: Path | None, folder: Path) -> tuple[list[str], str]:
    """Return the command that resumes a script, and where its flags come from; `{checkpoint}` stands for the file."""
    path = "" if checkpoint is None else os.path.relpath(checkpoint, folder)
    if given is not None:
        if "{checkpoint}" in given and not path:
            raise ValueError("--resume-args has {checkpoint}, but no file that torch.save wrote was seen")
        return [*argv, *shlex.split(given.replace("{checkpoint}", path))], "--resume-args"
    for flag, takes_value in _declared(argv[0]):
        if any(word == flag or word.startswith(f"{flag}=") for word in argv):
            return argv, "the flags it was given"
        if not takes_value:
            return [*argv, flag], f"{flag} is in its parser"
        if path:
            return [*argv, flag, path], f"{flag} is in its parser"
    return argv, "the same command again; --resume-args gives another one"


def _declared(file: str) -> list[tuple[str, bool]]:
    """The flags of a script's parser that resume, each with whether it takes a value."""
    tree, found = parsed(file), list[tuple[str, bool]]()
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in ("add_argument", "option"):
            continue
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        action = next(
            (k.value.value for k in node.keywords if k.arg == "action" and isinstance(k.value, ast.Constant)), ""
        )
        is_flag = any(k.arg == "is_flag" for k in node.keywords)
        flags = [name for name in names if _RESUMES.fullmatch(name)]
        if flags:
            found.append((flags[0], not (str(action).startswith("store_") or is_flag)))
    return found


def with_batch_size(argv: list[str], flag: str, factor: float) -> list[str]:
    """Return the command with the value of a flag multiplied; ValueError if the flag is not there with a number."""
    for n, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        value = value if equals else "".join(argv[n + 1 : n + 2])
        if not value.isdigit():
            break
        scaled = f"{round(int(value) * factor)}"
        return [*argv[:n], f"{flag}={scaled}", *argv[n + 1 :]] if equals else [*argv[: n + 1], scaled, *argv[n + 2 :]]
    raise ValueError(f"--batch-arg {flag}: give the script this flag with the batch size of one rank, as in {flag} 8")
