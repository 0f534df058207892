"""Functions of other modules replaced, and restored."""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
Arguments = dict[str, Any]


class Patches:
    """What was replaced, to be restored in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self.store: Any = None  # the key-value store of the process group, kept for after the group is destroyed

    def wrap(self, owner: Any, name: str, around: Callable[[Function], Function]) -> None:
        """Replace `owner.name` by `around(owner.name)`. The owner "module" or "module:Class" is that module or class,
        once it is imported."""
        if isinstance(owner, str):
            module, _, cls = owner.partition(":")
            self.when_imported(module, lambda found: self.wrap(getattr(found, cls) if cls else found, name, around))
            return
        own = name in vars(owner)
        before = vars(owner)[name] if own else getattr(owner, name)
        original = getattr(owner, name)
        if isinstance(before, classmethod):
            original = before.__func__
        watched = around(original)
        functools.update_wrapper(watched, original)
        kind = type(before) if isinstance(before, (classmethod, staticmethod)) else lambda function: function
        setattr(owner, name, kind(watched))
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def intercept(self, owner: Any, name: str, function: Function) -> None:
        """Replace `owner.name` by `function`, which gets the original before the arguments of the call."""
        self.wrap(owner, name, lambda original: lambda *args, **kwargs: function(original, *args, **kwargs))

    def edit_arguments(self, owner: Any, name: str, edit: Callable[[Arguments], None]) -> None:
        """Let `edit` change the arguments of each call of `owner.name`, by the names of its parameters."""

        def call(original: Function, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs)
            edit(bound.arguments)
            return original(*bound.args, **bound.kwargs)

        self.intercept(owner, name, call)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def later(self, undo: Callable[[], Any]) -> None:
        self._undo.append(undo)

    def when_imported(self, module: str, act: Callable[[ModuleType], None]) -> None:
        """Call `act` with a module once it is imported: the audit must not import what the script does not."""
        if module in sys.modules:
            act(sys.modules[module])
            return
        finder = _Finder(module, act)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class Hook:
    """A hook that stays with its module: in a copy of the module, or one that was saved and loaded, it does nothing."""

    def __init__(self, act: Function):
        self.act = act

    def __call__(self, *args: Any) -> Any:
        return self.act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Callable[[ModuleType], None]):
        self.name, self.act, self.is_busy = name, act, False

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self.name or self.is_busy:
            return None
        self.is_busy = True
        try:
            spec = importlib.util.find_spec(name)  # by the other finders: some may wait for the same module
        finally:
            self.is_busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
