"""State dicts of any depth as tensors and JSON, and back: what a checkpoint holds of any object with a `state_dict`.

tensors, outline = split(optimizer.state_dict())     tensors {"state.0.exp_avg": ...}, the rest as plain JSON
optimizer.load_state_dict(join(tensors, outline))

Dicts, lists, tuples, tensors, numbers, texts and None survive as they are, whatever the keys of a dict. In the JSON,
whatever JSON itself does not have is a dict with one key, which begins with "$".
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def split(state: Any, path: str = "") -> tuple[dict[str, Tensor], Any]:
    """Return the tensors by their path, such as `state.0.exp_avg`, and the rest as JSON; ValueError for other types."""
    tensors: dict[str, Tensor] = {}
    return tensors, _outline(state, path, tensors)


def _outline(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # {"a.b": x, "a": {"b": y}}
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_outline(item, _join(path, number), tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [
            [_outline(key, path, tensors), _outline(item, _join(path, key), tensors)] for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    what = f"{path or 'the state'} is a {type(value).__name__}"
    raise ValueError(f"{what}; a checkpoint holds tensors, numbers, texts, lists and dicts only")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def join(tensors: Mapping[str, Tensor], outline: Any) -> Any:
    """Return what `split` was given."""
    if isinstance(outline, list):
        return [join(tensors, item) for item in outline]
    if not isinstance(outline, dict):
        return outline
    if "$tensor" in outline:
        return tensors[outline["$tensor"]]
    if "$tuple" in outline:
        return tuple(join(tensors, item) for item in outline["$tuple"])
    for kind, made in (("$dict", dict), ("$counter", Counter)):
        if kind in outline:
            return made({join(tensors, key): join(tensors, item) for key, item in outline[kind]})
    return {key: join(tensors, item) for key, item in outline.items()}
