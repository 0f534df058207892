"""The work and the memory of one step, from fake tensors: they have a shape and no data, so nothing is computed.

The recipe's own model, data and loss run once forward and backward for each of two small micro-batches; every operator
that they call is counted. What grows with the micro-batch grows linearly, so two sizes give every other.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from .. import optim
from ..evaluate import dataset_size
from ..flags import Request
from ..loader import Fetch
from ..loss import Objective
from ..recipe import Recipe, SeveralTerms
from ..rng import Rng
from ..sharding.blocks import find_blocks, recompute
from ..stream import Slice

ITEMS = 4
"""Training samples that the micro-batches are made of; they are spread over the whole set."""
_ATEN = torch.ops.aten
_SAME_FLOPS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
"""Operators of the CPU, on which fake tensors are, whose formula is under the name of the GPU's."""


@dataclass(frozen=True)
class Work:
    """Of one micro-batch, forward and backward."""

    flops: float
    """Of matrix products, convolutions and attention."""
    product_traffic: float
    """Bytes that these read and write."""
    traffic: float
    """Bytes that all other operators read and write, if each runs by itself."""
    operators: float
    """Operators that run on the device, products included."""
    memory: float
    """The largest sum of bytes of all tensors at one time, without weights and their gradients: activations."""


@dataclass(frozen=True)
class Measured:
    """What a recipe needs: its model, and its work by the size of the micro-batch."""

    parameters: int
    trained: int
    """Parameters that have a gradient."""
    weights: float
    """Bytes of parameters and buffers."""
    gradients: float
    largest_block: float
    """Bytes of the largest part that full sharding gathers at once."""
    optimizer_state: float
    averages: float
    batch_norm: bool
    dataset: int
    sizes: tuple[int, int]
    works: tuple[Work, Work]
    """Of micro-batches of these sizes."""
    real: str = ""
    """Why tensors had to be real, if they had to."""

    def at(self, samples: float) -> Work:
        """Return the work of a micro-batch of any size."""
        (small, large), (a, b) = self.sizes, self.works
        share = (samples - small) / (large - small)
        pairs = zip(astuple(a), astuple(b), strict=True)
        return Work(*(max(0.0, one + share * (other - one)) for one, other in pairs))


class _Counter(TorchDispatchMode):
    """Counts every operator, and the bytes that are alive."""

    def __init__(self, known: set[int]):
        super().__init__()
        self.flops = self.product_traffic = self.traffic = self.operators = 0.0
        self.alive, self.peak = 0.0, 0.0
        self._known = known
        """Storages of weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [x for x in outputs if x.untyped_storage()._cdata not in self._known]
        for tensor in fresh:
            self._follow(tensor.untyped_storage())
        formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
            self.product_traffic += sum(map(_bytes, (*inputs, *outputs)))
            self.operators += 1
        elif (fresh or func._schema.is_mutable) and not func.__name__.startswith(("empty", "new_empty")):
            self.traffic += sum(map(_bytes, (*inputs, *outputs)))
            self.operators += 1
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _bytes(tensor: Tensor) -> float:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def measure(request: Request) -> Measured:
    """Return what a run of `request` needs. A recipe whose code looks at values is run on real tensors instead."""
    torch.manual_seed(request.train.data.seed)
    recipe = request.instance or request.recipe(request.options)
    recipe.optim = request.train.optim
    if (data := recipe.dataset("train")) is None:
        raise ValueError("the recipe has no training set: dataset('train') returned None")
    size = dataset_size(data)
    if not size:
        raise ValueError("the training set is empty; is the path of the data right?")
    samples = Slice(np.zeros(ITEMS, np.int64), np.linspace(0, size - 1, ITEMS, dtype=np.int64))
    fetch = Fetch.of(recipe, data, request.train.data.seed)
    try:
        with FakeTensorMode() as mode:
            return _measure(request, recipe, fetch, samples, size, mode)
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        reason = f"{error.func} needs the value of a tensor"
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        reason = f"the shape of {error.func} depends on the values of a tensor"
    except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
        reason = str(error).splitlines()[0]
    return _measure(request, recipe, fetch, samples, size, None, reason)


def _measure(
    request: Request, recipe: Recipe, fetch: Fetch, samples: Slice, size: int, mode: FakeTensorMode | None,
    reason: str = "",
) -> Measured:  # fmt: skip
    with _unfaked(mode):
        batches = [_batch(fetch, samples, count) for count in (ITEMS, 2 * ITEMS)]
    model = recipe.model()
    recipe.step = torch.zeros((), dtype=torch.int64)
    recipe.n_steps = request.train.data.n_steps or 1
    model.train()
    if (recomputed := request.train.hardware.activation_checkpointing) != "none":
        recompute(model, recomputed)
    works = [_work(request, recipe, model, tree_map(lambda x: _fake(x, mode), batch)) for batch in batches]
    parameters, trained = list(model.parameters()), [p for p in model.parameters() if p.requires_grad]
    return Measured(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        weights=sum(map(_bytes, (*parameters, *model.buffers()))),
        gradients=sum(map(_bytes, trained)),
        largest_block=_largest_block(model),
        optimizer_state=_optimizer_state(request, recipe, model),
        averages=_float_bytes(model) * len(request.train.optim.ema_decay),
        batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        dataset=size,
        sizes=(ITEMS, 2 * ITEMS),
        works=(works[0], works[1]),
        real=reason,
    )


@contextmanager
def _unfaked(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let the block make real tensors: samples are read as they are."""
    if mode is None:
        yield
    else:
        with torch.utils._python_dispatch._disable_current_modes():
            yield


def _batch(fetch: Fetch, samples: Slice, count: int) -> Any:
    places = np.arange(count) % len(samples.index)
    (micro,) = fetch.__getitems__((Slice(samples.epoch[places], samples.index[places]), 0, True))
    if micro.error:
        raise ValueError(micro.error)
    return micro.batch, micro.epochs, micro.indices


def _fake(value: Any, mode: FakeTensorMode | None) -> Any:
    return mode.from_tensor(value) if mode is not None and isinstance(value, Tensor) else value


def _work(request: Request, recipe: Recipe, model: nn.Module, micro: tuple[Any, Tensor, Tensor]) -> Work:
    """Run one micro-batch forward and backward, and return what it took."""
    batch, epochs, indices = micro
    seed, precision = request.train.data.seed, request.train.hardware.precision
    objective = Objective(recipe.loss, model, seed)
    per_sample = None
    if isinstance(recipe, SeveralTerms):
        counts = recipe.term_counts(batch, Rng.of(seed, epochs, indices))
        per_sample = {name: count.clamp(min=1) / len(indices) for name, count in counts.items()}
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if p.requires_grad]
    held = {x.untyped_storage()._cdata for x in tree_leaves((micro, [*model.parameters()], [*model.buffers()]))
            if isinstance(x, Tensor)}  # fmt: skip
    half = {"fp16": torch.float16, "fp32": None, "fp64": None}.get(precision, torch.bfloat16)
    with _Counter(held) as counter:
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
            total, _, _ = objective(batch, epochs, indices, per_sample)
        total.backward()
    for handle in handles:
        handle.remove()
    return Work(counter.flops, counter.product_traffic, counter.traffic, counter.operators, counter.peak)


def _drop(parameter: Tensor) -> None:
    """Free a gradient as soon as it is there: gradients are counted by themselves."""
    parameter.grad = None


def _optimizer_state(request: Request, recipe: Recipe, model: nn.Module) -> float:
    """Return the bytes of the optimizer's state after a step."""
    optimizer = optim.check_optimizer(recipe.optimizer(model)) or optim.build(request.train.optim, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return sum(_bytes(x) for x in tree_leaves([*optimizer.state.values()]) if isinstance(x, Tensor) and x.numel() > 1)


def _float_bytes(model: nn.Module) -> float:
    """Return the bytes of what an average of the model holds; tied weights count once."""
    unique = {x.untyped_storage()._cdata: x for x in model.state_dict().values() if x.is_floating_point()}
    return sum(map(_bytes, unique.values()))


def _largest_block(model: nn.Module) -> float:
    """Return the bytes of the largest part that is gathered at once: a block, or what is in none."""
    parts = [{id(p): p for p in block.parameters()} for block in find_blocks(model)]
    rest = [p for p in model.parameters() if not any(id(p) in part for part in parts)]
    return max(sum(map(_bytes, part)) for part in (rest, *(part.values() for part in parts)))
