"""Collectives, with the line that calls each: entered, left, failed."""

import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..events import Collective, PaddingDropped, Reduced
from ..patch import Function, Patches
from ..source import caller, foreign
from .context import Context, never_raises

SHAPED = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
"""All ranks must bring the same number of elements."""
ALL = (
    *SHAPED, "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "new_group",
)  # fmt: skip
_FORMS = ("torch/distributed/nn/functional.py", "torch/autograd/function.py")
"""Files of torch with other forms of collectives."""
_FEW = 16
_ROOTS = ("src", "dst", "group_src", "group_dst")


def install(context: Context) -> None:
    for name in (*ALL, "init_process_group", "destroy_process_group"):
        context.intercept(dist, name, partial(_collective, context, name))
    context.watch("accelerate.accelerator:Accelerator", "gather_for_metrics", context.writes(PaddingDropped))


def keep_store(patches: Patches) -> None:
    """Keep the store for after the group is destroyed. A group made again would find what the old one left in it."""
    if dist.is_initialized():
        patches.store = dist.distributed_c10d._get_default_store()

    def init_process_group(original: Function, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        patches.store = dist.distributed_c10d._get_default_store()

    patches.intercept(dist, "init_process_group", init_process_group)


def _collective(context: Context, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
    if any(a is dist.GroupMember.NON_GROUP_MEMBER for a in (kwargs.get("group"), *args)):
        return original(*args, **kwargs)
    event = _event(context, name, args, kwargs) or Collective(name, group=[])
    event.by_library = foreign(caller(*_FORMS).file)
    with context.recorder.call(event), context.recorder.hide():
        result = original(*args, **kwargs)
    if name == "all_reduce" and result is None and not context.in_loop:
        _record_result(context, *args, **kwargs)
    return result


@never_raises
def _record_result(context: Context, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Record what a metric may be computed from: counts that show how many samples were evaluated."""
    if tensor.numel() <= _FEW and not tensor.is_complex():
        with context.recorder.hide():
            context.recorder.write(Reduced([float(value) for value in tensor.detach().flatten().tolist()]))


@never_raises
def _event(context: Context, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    event = Collective(name, in_thread=threading.current_thread() is not threading.main_thread())
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    if group is not None and group is not dist.group.WORLD:
        event.group, event.group_name = dist.get_process_group_ranks(group), group.group_name
    tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
    if name in SHAPED and tensor is not None:
        event.shape, event.dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        context.reduced += tensor.numel() if tensor.is_floating_point() else 0
    if name == "new_group":
        event.members = next((list(r) for r in (kwargs.get("ranks"), *args[:1]) if r is not None), None)
    root = next((kwargs[k] for k in _ROOTS if k in kwargs), None)
    if root is None and name in ("broadcast", "reduce", "broadcast_object_list") and len(args) > 1:
        root = args[1]
    event.root = root if isinstance(root, int) else None
    return event
