"""What the user's source says that no record shows: read as a tree, so that comments and strings do not count."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def asks(files: Iterable[str], names: Iterable[str]) -> bool | None:
    """Whether the files read one of the entries `names` of what they load; None if none of them can be read."""
    trees = [tree for file in sorted(set(files)) if (tree := _parsed(file)) is not None]
    if not trees:
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    loaded, wanted = _Loaded(nodes), set(names)
    return any(loaded(thing) and keys & wanted for node in nodes for thing, keys in _read(node))


def _parsed(file: str) -> ast.AST | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


class _Loaded:
    """Whether an expression is what was loaded. By names alone, wherever they are: a function that loads gives back
    what it loaded, and what is passed to a function is in it what it was outside."""

    def __init__(self, nodes: list[ast.AST]):
        self.loaders, self.holders = set[str](), set[str]()
        functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        before = -1
        while before != (before := len(self.loaders) + len(self.holders)):
            for function in functions:
                returns = (n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value)
                if any(self(value) for value in returns):
                    self.loaders.add(function.name)
            for node in nodes:
                self._follow(node, functions)

    def _follow(self, node: ast.AST, functions: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value and self(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self.holders |= {name for target in targets if (name := _name(target))}
        if isinstance(node, ast.Call):
            passed = [n for n, value in enumerate(node.args) if self(value)]
            for function in functions:
                own = [a.arg for a in function.args.args]
                own = own[1:] if own[:1] == ["self"] else own
                if function.name == _name(node.func):
                    self.holders |= {own[n] for n in passed if n < len(own)}
                    self.holders |= {k.arg for k in node.keywords if k.arg and self(k.value)}

    def __call__(self, expression: ast.AST) -> bool:
        if isinstance(expression, ast.Call):
            return _name(expression.func) in self.loaders or ast.unparse(expression.func) in ("torch.load", "load")
        return _name(expression) in self.holders


def _name(expression: ast.AST) -> str | None:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def _read(node: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """The thing of which entries are read here, and their names."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
        yield node.value, {str(node.slice.value)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        yield node.func.value, {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
