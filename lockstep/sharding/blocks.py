"""The repeated blocks of a model, found from outside, and recomputing their activations in the backward pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..batchnorm import has_batch_norm

Recompute = Literal["none", "blocks", "selective"]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost items of nn.ModuleList and nn.Sequential that have layers of their own, in order."""
    return list(dict.fromkeys(_blocks_of(model)))


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _blocks_of(child)


def recompute(model: nn.Module, what: Recompute) -> int:
    """Let blocks recompute activations in the backward pass, and return how many do.

    `blocks`: only their inputs are kept. `selective`: results of matrix products, convolutions and attention are kept
    too, which take the most time to compute; all else is recomputed.
    """
    blocks = [block for block in find_blocks(model) if not has_batch_norm(block)]  # it would count a sample twice
    if not blocks:
        raise ValueError(
            f"--activation_checkpointing {what} recomputes the blocks of a model: the items of an nn.ModuleList or "
            "nn.Sequential that have several layers and no BatchNorm. This model has none; use none"
        )
    settings: dict[str, Any] = {"context_fn": _selective_contexts} if what == "selective" else {}
    for block in blocks:
        wrap_forward(block, partial(_recomputed, settings))
    return len(blocks)


def wrap_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a module's forward pass does. The module stays what it is: no wrapper, no other names of tensors."""
    module.forward = wrap(module.forward)


def _recomputed(settings: dict[str, Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)

    return forward_recomputed


_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def _selective_contexts() -> Any:
    kept = {getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
