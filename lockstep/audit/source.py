"""The user's source: which code is the user's, which line of it runs, and what its syntax tree shows."""

import ast
import importlib.machinery
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

OURS = str(Path(__file__).parent) + os.sep
_STARTER = str(Path(__file__).parents[1] / "script.py")
_PATHS = sysconfig.get_paths()
_LIBRARIES = (
    *(p + os.sep for p in (_PATHS["stdlib"], _PATHS["purelib"], str(Path(torch.__file__).parent))),
    OURS,
    _STARTER,
)
_foreign: dict[str, bool] = {}
_audited: set[str] = set()
"""Folders of the installed package that is audited."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_RANK_WORDS = ({"rank"}, {"procid"}, {"process", "index"}, {"process", "zero"}, {"global", "zero"}, {"local", "zero"})
"""A name with all words of one of these tells ranks apart: local_rank, SLURM_PROCID, is_global_zero."""
_ROLES, _OF_ROLES = {"main", "master", "leader", "chief", "primary"}, {"is", "process", "node", "worker", "local"}
"""So does a name of only these words: is_main, master_process; not main() or master_addr."""


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


# -- files and frames -------------------------------------------------------------------------------------------------
def foreign(file: str) -> bool:
    """Whether code in `file` belongs to a library and not to the user."""
    if file not in _foreign:
        library = file.startswith(("<", *_LIBRARIES)) or generated(file) or f"{os.sep}site-packages{os.sep}" in file
        _foreign[file] = library and (file.startswith(OURS) or not file.startswith(tuple(_audited)))
    return _foreign[file]


def generated(file: str) -> bool:
    """Whether torch.compile wrote the code in `file`."""
    return "torchinductor_" in file or file.startswith(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "\0")


def audit_package(module: str | None) -> None:
    """Count the installed package of a module, and no other, as the user's code. None: a script is audited."""
    _audited.clear()
    _foreign.clear()
    package = (module or "").partition(".")[0]
    if package in ("", "torch") or module == "lockstep.audit.call":  # these only start what is audited
        return
    spec = importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is not None:
        folders = [str(Path(folder)) + os.sep for folder in spec.submodule_search_locations or ()]
        _audited.update(folders or [spec.origin or "?"])


def caller(*through: str) -> Site:
    """The innermost line outside of the audit, and of files whose path ends with one of `through`."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(OURS) or frame.f_code.co_filename.endswith(through)):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)


def user_line() -> Site | None:
    """The innermost line of the user's code on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not foreign(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def source_lines(file: str) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return Path(file).read_text(errors="replace").split("\n")
    except OSError:
        return []


def source_line(at: Site | None) -> str:
    """The text of a line; empty if it cannot be read."""
    lines = source_lines(at.file) if at else []
    return lines[at.line - 1] if at and 0 < at.line <= len(lines) else ""


def line_with(files: Iterable[str], word: str) -> Site | None:
    """The first line that holds a word, outside of comments."""
    lines = (
        Site(f, n)
        for f in sorted(set(files))
        for n, line in enumerate(source_lines(f), 1)
        if word in line.split("#")[0]
    )
    return next(lines, None)


# -- syntax trees -----------------------------------------------------------------------------------------------------
def depends_on_rank(at: Site | None) -> bool:
    """Whether a line is in a branch whose condition names the rank."""
    tree = parsed(at.file) if at else None
    if tree is None or at is None:
        return False
    branches = (n for n in ast.walk(tree) if isinstance(n, (ast.If, ast.IfExp)))
    tests = (n.test for n in branches if n.lineno <= at.line <= (n.end_lineno or 0))
    return any(names_rank(node) for test in tests for node in ast.walk(test))


def demanded_world(at: Site | None, error: str) -> int | None:
    """How many ranks a script asks for where it fails: a number in the error of a device mesh, or one that the failing
    `assert` or `if` compares with the number of ranks. None: it asks for none."""
    if mesh := re.search(r"default world size \d+, but found (\d+) ranks", error):
        return int(mesh[1])
    tree = parsed(at.file) if at else None
    if tree is None or at is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assert, ast.If)) and node.lineno <= at.line <= (node.end_lineno or 0):
            for test in (part for part in ast.walk(node.test) if isinstance(part, ast.Compare)):
                names = {word for part in ast.walk(test) for word in _words(_text(part))}
                numbers = [p.value for p in ast.walk(test) if isinstance(p, ast.Constant) and type(p.value) is int]
                if names & {"world", "nproc", "gpus", "ranks", "processes"} and len(numbers) == 1:
                    return numbers[0]
    return None


def cuts_off(files: Iterable[str]) -> bool:
    """Return whether a file keeps only the first so many entries of something, as many as a data set or a counter
    says."""
    for node in (node for file in files if (tree := parsed(file)) is not None for node in ast.walk(tree)):
        part = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(part, ast.Slice) and part.lower is None and part.upper is not None:
            words = {word for name in ast.walk(part.upper) for word in _words(name_of(name) or "")}
            if words & {"len", "length", "num", "total", "size", "samples", "count", "remainder", "n"}:
                return True
    return False


def _text(node: ast.AST) -> str:
    """The name, or the string, that a node is."""
    constant = node.value if isinstance(node, ast.Constant) else None
    return constant if isinstance(constant, str) else name_of(node) or ""


def names_rank(node: ast.AST) -> bool:
    """Return whether a name or constant tells ranks apart."""
    if isinstance(node, ast.Constant):  # os.environ["RANK"], but not __name__ == "__main__"
        return isinstance(node.value, str) and bool(_words(node.value) & {"rank", "procid"})
    words = _words(name_of(node) or "")
    role = bool(words & _ROLES) and words <= _ROLES | _OF_ROLES and words != {"main"}
    return role or any(needed <= words for needed in _RANK_WORDS)


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}


def parsed(file: str) -> ast.AST | None:
    """Return the syntax tree of a file; None if it cannot be read or is no Python."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def name_of(expression: ast.AST) -> str | None:
    """Return the last part of a name; None for another expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None
