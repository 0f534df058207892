"""Collectives, with the line that calls each: entered, left, failed."""

import sys
import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..patch import Function, Patches
from ..trace import foreign
from .context import Context, careful

SHAPED = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
"""All ranks must bring the same number of elements."""
ALL = (
    *SHAPED, "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "new_group",
)  # fmt: skip
_FORMS = ("torch/distributed/nn/functional.py", "torch/autograd/function.py")
_ROOTS = ("src", "dst", "group_src", "group_dst")


def install(context: Context, patches: Patches) -> None:
    for name in ALL:
        patches.wrap(dist, name, partial(_watched, context, name))
    for name in ("init_process_group", "destroy_process_group"):
        patches.wrap(dist, name, partial(_watched, context, name))


def keep_store(patches: Patches) -> None:
    """For after the group is gone. A group that is made anew then meets what the old one has left in it."""
    patches.wrap(dist, "init_process_group", lambda original: _keep_store(patches, original))
    if dist.is_initialized():
        patches.store = dist.distributed_c10d._get_default_store()


def _keep_store(patches: Patches, original: Function) -> Function:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        patches.store = dist.distributed_c10d._get_default_store()

    return init_process_group


def _watched(context: Context, name: str, original: Function) -> Function:
    def collective(*args: Any, **kwargs: Any) -> Any:
        outsider = any(a is dist.GroupMember.NON_GROUP_MEMBER for a in (kwargs.get("group"), *args))
        if context.hidden or outsider:
            return original(*args, **kwargs)
        number = context.collectives = context.collectives + 1
        library = foreign(_asker())
        seen = _signature(context, name, args, kwargs) or {"group": []}  # of nobody
        context.recorder.write("collective", phase="in", op=name, n=number, by_library=library, **seen)
        try:
            with context.recorder.hide():
                result = original(*args, **kwargs)
        except BaseException as error:
            context.recorder.write("collective", phase="failed", op=name, n=number, why=str(error)[:500])
            raise
        context.recorder.write("collective", phase="out", op=name, n=number)
        return result

    return collective


def _asker() -> str:
    """The file of the code that calls a collective, perhaps through one of torch's other forms of it."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.endswith(_FORMS):
        frame = frame.f_back
    return frame.f_code.co_filename


@careful
def _signature(context: Context, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    seen: dict[str, Any] = {"group": None}
    if group is not None and group is not dist.group.WORLD:
        seen |= {"group": dist.get_process_group_ranks(group), "name": group.group_name}
    if threading.current_thread() is not threading.main_thread():
        seen["aside"] = True
    if name in SHAPED and tensor is not None:
        seen["shape"], seen["dtype"] = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if name == "new_group":
        seen["members"] = next((list(r) for r in (kwargs.get("ranks"), *args[:1]) if r is not None), None)
    root = next((kwargs[k] for k in _ROOTS if k in kwargs), None)
    if root is None and name in ("broadcast", "reduce", "broadcast_object_list") and len(args) > 1:
        root = args[1]
    if isinstance(root, int):
        seen["root"] = root
    return seen
