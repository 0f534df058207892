"""What a script does with what it loads from a checkpoint, by its syntax tree."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from .source import name_of, parsed

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_PRINTING = ("print", "debug", "info", "warning", "log", "format")
_COPYING = ("dict", "cast", "copy", "deepcopy")
_ALL = "**"


def reads_entry(files: Iterable[str], names: Iterable[str], loader: str = "torch") -> bool | None:
    """Return whether the files use an entry, called by one of `names`, of what they load with a module; None if no file
    can be parsed."""
    trees = [tree for file in sorted(set(files)) if (tree := parsed(file)) is not None]
    if not trees:
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    loaded, wanted = _loaded(nodes, _Variables(trees), loader), set(names)
    printed = {id(part) for node in nodes if _prints(node) for part in ast.walk(node)}
    used = (node for node in nodes if id(node) not in printed)
    return any(loaded(value) and keys & {_ALL, *wanted} for node in used for value, keys in _read(node))


def _prints(node: ast.AST) -> bool:
    """Whether something is formatted or logged here: a script that prints a file's epoch need not resume from it."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and name_of(node.func) in _PRINTING)


class _Variables:
    """The names of variables. One of a function has the function in its name: another function may have one of the same
    name."""

    def __init__(self, trees: Iterable[ast.AST]):
        self.local: dict[int, str] = {}  # by the id of the node
        for tree in trees:
            self._resolve(tree, {})

    def name(self, expression: ast.AST) -> str | None:
        return self.local.get(id(expression)) or name_of(expression)

    def parameter(self, function: _Function, name: str | None) -> str:
        return f"{id(function)}:{name}"

    def _resolve(self, node: ast.AST, known: dict[str, str]) -> None:
        if isinstance(node, _Function):
            known = known | {name: self.parameter(node, name) for name in _bound(node)}
        if isinstance(node, ast.Name) and node.id in known:
            self.local[id(node)] = known[node.id]
        for child in ast.iter_child_nodes(node):
            self._resolve(child, known)


def _bound(function: _Function) -> set[str]:
    """The names of a function's parameters and of the variables that it sets."""
    found, elsewhere, nodes = set[str](), set[str](), list[ast.AST](function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
        nodes += [] if isinstance(node, _Function) else ast.iter_child_nodes(node)
    given = function.args
    return (found - elsewhere) | {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _loaded(nodes: list[ast.AST], variables: _Variables, loader: str) -> Callable[[ast.AST], bool]:
    """Whether an expression is a loaded checkpoint. It is followed by name through all files."""
    imports = (a for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name == loader and a.asname)
    modules = [loader, *(a.asname for a in imports)]
    loads = {"load", "loads", *(f"{module}.{load}" for module in modules for load in ("load", "loads"))}
    flows = [(name, list(_values(expression))) for name, expression in _flows(nodes, variables)]
    names = set[str | None]()

    def is_loaded(value: ast.AST) -> bool:
        if isinstance(value, ast.Call):
            return variables.name(value.func) in names or ast.unparse(value.func) in loads
        return variables.name(value) in names

    while new := {name for name, values in flows if name and name not in names and any(map(is_loaded, values))}:
        names |= new
    return lambda expression: any(map(is_loaded, _values(expression)))


def _flows(nodes: list[ast.AST], variables: _Variables) -> Iterator[tuple[str | None, ast.AST]]:
    """The names of variables, parameters and functions, each with an expression whose value it gets or returns."""
    functions = defaultdict[str | None, list[_Function]](list)
    for function in (n for n in nodes if isinstance(n, _Function)):
        functions[function.name].append(function)
        yield from ((function.name, n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value)
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(map(variables.name, target.elts), node.value.elts, strict=False)
                else:
                    yield from ((variables.name(part), node.value) for part in _values(target))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "update":
                yield from ((variables.name(node.func.value), argument) for argument in node.args)
            for function in functions.get(name_of(node.func), ()):
                given = (variables.parameter(function, a.arg) for a in function.args.args if a.arg != "self")
                yield from zip(given, node.args, strict=False)
                yield from ((variables.parameter(function, k.arg), k.value) for k in node.keywords)


def _values(expression: ast.AST) -> Iterator[ast.AST]:
    """The expression, and those of its parts that it may be, hold, or copy."""
    yield expression
    parts: list[ast.expr] = []
    if isinstance(expression, ast.IfExp):
        parts = [expression.body, expression.orelse]
    elif isinstance(expression, ast.BoolOp):
        parts = expression.values
    elif isinstance(expression, ast.Tuple):
        parts = expression.elts
    elif isinstance(expression, ast.Call) and name_of(expression.func) in _COPYING:
        owner = [expression.func.value] if isinstance(expression.func, ast.Attribute) else []
        parts = [*owner, *expression.args]
    for part in parts:
        yield from _values(part)


def _read(node: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """The expressions whose entries are read at this node, with the names of the entries."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
        yield node.value, {str(node.slice.value)}
    if isinstance(node, ast.Call):
        yield from ((keyword.value, {_ALL}) for keyword in node.keywords if keyword.arg is None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        yield node.func.value, {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
