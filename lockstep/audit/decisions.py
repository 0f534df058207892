"""Whether a script lets a measured value pick the checkpoint or stop the run, by its syntax tree."""

import ast
from collections.abc import Iterable, Iterator

from .source import Site, names_rank, parsed

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_COUNTERS = {"epoch", "epochs", "step", "steps", "iteration", "iter", "it", "i", "n"}
_KEPT = ("best", "patience", "improve", "lowest", "highest", "plateau", "wait", "bad_epochs")
"""Parts of the names of variables that keep the best value so far, or how long it has stood."""


def decides(evaluation: Site | None, saves: Iterable[Site | None]) -> str | None:
    """Return what the value of an evaluation decides, "picks the checkpoint" or "stops the run"; None if nothing."""
    if any(_is_picked(at) for at in saves if at):
        return "picks the checkpoint"
    tree = parsed(evaluation.file) if evaluation else None
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If)) if tree is not None else ()
    return "stops the run" if any(_keeps(node.test) and _leaves(node) for node in branches) else None


def _is_picked(save: Site) -> bool:
    """Whether the line, or a call of the function that it is in, stands under a comparison of values."""
    tree = parsed(save.file)
    if tree is None:
        return False
    lines = [save.line]
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [f.name for f in functions if f.lineno <= save.line <= (f.end_lineno or 0)]
    lines += [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in around[-1:]]
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    inside = (b for b in branches for line in lines if b.body[0].lineno <= line <= (b.body[-1].end_lineno or 0))
    return any(_compares(branch.test) for branch in inside)


def _leaves(branch: ast.If) -> bool:
    """Whether a branch ends a loop or a function, or sets a variable that says so."""
    for node in (inner for statement in branch.body for inner in ast.walk(statement)):
        if isinstance(node, (ast.Break, ast.Return)):
            return True
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
            return any("stop" in (_name(target) or "") for target in node.targets)
    return False


def _compares(test: ast.AST) -> bool:
    """Whether a condition orders two values that are no counters of steps and no ranks."""
    values = (node for node in _comparisons(test) if not _names(node) & _COUNTERS)
    return any(not any(map(names_rank, ast.walk(node))) for node in values)


def _keeps(test: ast.AST) -> bool:
    """Whether a condition orders a value that keeps the best so far, or how long it has stood."""
    return any(part in name for node in _comparisons(test) for name in _names(node) for part in _KEPT)


def _comparisons(test: ast.AST) -> Iterator[ast.Compare]:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and any(isinstance(op, _ORDER) for op in node.ops):
            yield node


def _names(node: ast.AST) -> set[str]:
    return {name.lower() for part in ast.walk(node) if (name := _name(part))}


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
