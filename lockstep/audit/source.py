"""What the user's source says that no record shows: read as a tree, so that comments and strings do not count."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SAYING = ("print", "debug", "info", "warning", "log", "format")
_COPYING = ("dict", "cast", "copy", "deepcopy")
_ALL = "**"


def declared_flag(file: str, flags: tuple[str, ...]) -> str | None:
    """Which of `flags` a script's parser declares."""
    tree = _parsed(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and _name(node.func) in ("add_argument", "option"):
            found = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value in flags]
            if found:
                return str(found[0])
    return None


def asks(files: Iterable[str], names: Iterable[str]) -> bool | None:
    """Whether the files read one of the entries `names` of what they load; None if none of them can be read."""
    trees = [tree for file in sorted(set(files)) if (tree := _parsed(file)) is not None]
    if not trees:
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    loaded, wanted = _Loaded(nodes), set(names)
    shown = {id(part) for node in nodes if _shows(node) for part in ast.walk(node)}
    used = (node for node in nodes if id(node) not in shown)
    return any(loaded(thing) and keys & {_ALL, *wanted} for node in used for thing, keys in _read(node))


def _shows(node: ast.AST) -> bool:
    """Whether something is made into words here: who says the epoch of a file does not go on from it."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name(node.func) in _SAYING)


def _parsed(file: str) -> ast.AST | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


class _Loaded:
    """Whether an expression is what was loaded. By names alone, wherever they are: a function that loads gives back
    what it loaded, and what is passed to a function is in it what it was outside."""

    def __init__(self, nodes: list[ast.AST]):
        imports = [a for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name == "torch"]
        self.calls = {"load", "torch.load", *(f"{a.asname}.load" for a in imports if a.asname)}
        self.loaders, self.holders = set[str](), set[str]()
        self.functions = defaultdict[str, list[_Function]](list)
        for node in nodes:
            if isinstance(node, _Function):
                self.functions[node.name].append(node)
        before = -1
        while before != (before := len(self.loaders) + len(self.holders)):
            for name, functions in self.functions.items():
                ends = (n for f in functions for n in ast.walk(f) if isinstance(n, ast.Return))
                if any(end.value is not None and self(end.value) for end in ends):
                    self.loaders.add(name)
            for node in nodes:
                self._follow(node)

    def _follow(self, node: ast.AST) -> None:
        pairs: list[tuple[list[ast.expr], ast.expr | None]] = []
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            both = (zip(t.elts, node.value.elts, strict=False) for t in node.targets if isinstance(t, ast.Tuple))
            pairs = [([target], value) for pair in both for target, value in pair]
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            pairs = [(node.targets if isinstance(node, ast.Assign) else [node.target], node.value)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            pairs = [([node.func.value], value) for value in node.args]
        for targets in (targets for targets, value in pairs if value is not None and self(value)):
            parts = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
            self.holders |= {name for part in parts if (name := _name(part))}
        if isinstance(node, ast.Call):
            for function in self.functions.get(_name(node.func) or "", ()):
                own = [a.arg for a in function.args.args if a.arg != "self"]
                passed = [n for n, value in enumerate(node.args) if self(value)]
                self.holders |= {own[n] for n in passed if n < len(own)}
                self.holders |= {k.arg for k in node.keywords if k.arg and self(k.value)}

    def __call__(self, expression: ast.AST) -> bool:
        if isinstance(expression, ast.Call):
            name = _name(expression.func)
            copied = name in _COPYING and any(self(a) for a in expression.args)
            copied |= name == "copy" and isinstance(expression.func, ast.Attribute) and self(expression.func.value)
            return copied or name in self.loaders or ast.unparse(expression.func) in self.calls
        if isinstance(expression, ast.IfExp):
            return self(expression.body) or self(expression.orelse)
        if isinstance(expression, ast.BoolOp):
            return any(self(value) for value in expression.values)
        return _name(expression) in self.holders


def _name(expression: ast.AST) -> str | None:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def _read(node: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """The thing of which entries are read here, and their names."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
        yield node.value, {str(node.slice.value)}
    if isinstance(node, ast.Call):
        yield from ((keyword.value, {_ALL}) for keyword in node.keywords if keyword.arg is None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        yield node.func.value, {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
