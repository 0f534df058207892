"""One objective on many ranks, with gradients summed over all of them.

The only file that names DistributedDataParallel; what FSDP2 does is in sharding/.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .batching import MicroBatch
from .batchnorm import SyncBatchNorm, TileBatchNorm, TileStatistics
from .distributed import RunFailed, World
from .exact import ExactSums
from .gradient_sums import GradientSums
from .loss import Objective
from .sharding import FullySharded

# The option that broadcasts buffers at every forward pass has another name since torch 2.13.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass(frozen=True)
class Wire:
    """How gradients go from rank to rank."""

    bucket_mb: int = 25
    """About how much is summed at a time."""
    dtype: torch.dtype | None = None
    """What gradients are sent as, if not as they are."""


class Buckets:
    """The gradient buckets of one step. It holds no reference to the replica, or DDP would never be freed.

    `dtype`: what gradients are sent as, if not as they are.
    """

    def __init__(self, sums: ExactSums | None, dtype: torch.dtype | None = None) -> None:
        self.sums, self.dtype = sums, dtype
        self.issued = 0
        """How many all-reduces this step has issued; the step sets it to 0 at its start."""
        self.layout: dict[int, Tensor] = {}
        """By number of the bucket, the tensor that is all-reduced."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called whenever a bucket is ready to be summed."""
        self.on_last: Callable[[], None] = lambda: None
        """Called when this rank has all its gradients, and the other ranks' are on their way."""

    def release(self) -> None:
        """Issue the all-reduces that are missing, with zeros: other ranks wait for gradients this rank cannot make."""
        for number in sorted(self.layout)[self.issued :]:
            dist.all_reduce(torch.zeros_like(self.layout[number]))

    def sent_as(self, bucket: dist.GradBucket) -> Tensor:
        """Return what is all-reduced for a bucket; where it is smaller, in memory that is used in each step."""
        gradients, kept = bucket.buffer().detach(), self.layout.get(bucket.index())
        if self.dtype is None or self.dtype.itemsize >= gradients.dtype.itemsize:
            return gradients
        if kept is None or kept.shape != gradients.shape:
            return gradients.to(self.dtype)
        return kept.copy_(gradients)

    def describe(self) -> str:
        """Return how much is sent in a step."""
        tensors = list(self.layout.values())
        if not tensors:
            return ""  # FSDP sends them
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        return f"{sum(t.nbytes for t in tensors) / 1e6:.1f} MB per step as {', '.join(kinds)}, {len(tensors)} bucket(s)"


def _sum_bucket(buckets: Buckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: sum a bucket over the ranks (loss.py divides) and remember its shape."""
    buckets.issued += 1
    buckets.on_ready()
    gradients, summed = bucket.buffer(), buckets.sent_as(bucket)
    if buckets.sums is not None:
        numbers = [buckets.sums.number[parameter] for parameter in bucket.parameters()]
        tile = list(zip(numbers, bucket.gradients(), strict=True))
        buckets.sums.add(tile, last=True)
        if buckets.sums.observer is not None:
            buckets.sums.observer.add_sums([(i, gradient.view(torch.int32)) for i, gradient in tile])
        summed = summed.view(torch.int32)
    buckets.layout[bucket.index()] = summed
    work = dist.all_reduce(summed, async_op=True)
    if bucket.is_last():
        buckets.on_last()
    if summed.dtype.itemsize < gradients.dtype.itemsize:
        return work.get_future().then(lambda _: gradients.copy_(summed))
    return work.get_future().then(lambda done: done.value()[0].view(gradients.dtype))


class Tiles:
    """What an exact run collects tile by tile: sums of gradients, and statistics of BatchNorm."""

    def __init__(self, model: nn.Module, sums: ExactSums, count: int, world: World):
        self.sums, self.statistics, self.world = sums, TileStatistics(model, count, world), world
        self._model, self._buffers = model, {name: buffer.clone() for name, buffer in _own_buffers(model)}
        self.unwrapped: GradientSums | None = None
        """Sums over the ranks where no DDP does."""
        sums.set_tiles(count)

    def start_step(self) -> None:
        self.sums.start_step()
        self.statistics.start_step()

    def finish_gradients(self) -> Tensor:
        """Make the summed gradients ready for the optimizer; return whether they did not fit, on the device."""
        self.sums.finish_step()
        return self.sums.overflow

    def finish_statistics(self, skipped: Tensor) -> None:
        self.statistics.finish_step(skipped)

    def start_tile(self, number: int) -> None:
        if self.sums.observer is not None:
            self.sums.observer.start_tile(number)

    def finish_tile(self, number: int, last: bool) -> None:
        """Take the gradients that a backward pass has made; DDP's hook has added those of the last tile."""
        self.statistics.record(number)
        if not last or self.world.size == 1 or self.unwrapped is not None:
            self.sums.add_local(last)
        if last and self.unwrapped is not None:
            if self.sums.observer is not None:
                self.sums.observer.add_sums(self.sums.integers())
            self.unwrapped.sum_integers()

    def check_buffers(self) -> None:
        """After the first step: refuse a model whose forward pass changes a buffer; each rank's tiles would differ."""
        for name, buffer in _own_buffers(self._model) if self._buffers else ():
            if not torch.equal(buffer.nan_to_num(), self._buffers[name].nan_to_num()):
                raise RunFailed(
                    f"--exact: a forward pass changes the buffer {name}, which would depend on the tiles of a rank; "
                    "only BatchNorm may do that. Train without --exact, or change it in one place for all ranks"
                )
        self._buffers = {}


def _own_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that are not BatchNorm's."""
    modules = [(name, m) for name, m in model.named_modules() if not isinstance(m, TileBatchNorm)]
    return [(f"{name}.{n}".lstrip("."), b) for name, m in modules for n, b in m.named_buffers(recurse=False)]


class Replica:
    """This rank's copy of the objective, as the step uses it.

    Gradients are summed over the ranks bucket by bucket, while backward is still running. DDP records its first
    passes: a static graph must be synchronised in the first one, and the buckets are rebuilt after it, which changes
    the order of summation. So that a resumed run has the bits of one that never stopped, `warm_up` makes three passes
    before the first step and throws them away. Where parameters take part only in some steps, no DDP is used: it
    expects the same ones in every step.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        static_graph: bool,
        tiles: Tiles | None = None,
        fully: FullySharded | None = None,
        wire: Wire | None = None,
        same_parameters: bool = True,
    ):
        """`fully`: the objective's parameters are spread over the ranks, and it sums gradients by itself.
        `same_parameters`: whether the same ones get gradients in every step, on every rank.
        """
        wire = wire or Wire()
        self.objective, self.model, self.world, self._fully = objective, objective.model, world, fully
        self.forward: Callable[..., Any] = objective
        """Call this, never the objective itself: gradients are synchronised on the way back."""
        self.no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Within it, backward adds up gradients on this rank alone."""
        self.backward: Callable[[Tensor], None] = Tensor.backward
        self.buckets = Buckets(tiles.sums if tiles else None, wire.dtype)
        self.unwrapped: GradientSums | None = None
        if world.size > 1 and fully is None and same_parameters:
            self.forward = ddp = self._wrap(objective, world, static_graph, wire.bucket_mb)
            self.no_sync = ddp.no_sync
        elif world.size > 1 and fully is None:
            self._sum_unwrapped(tiles)

    def _sum_unwrapped(self, tiles: Tiles | None) -> None:
        """Sum gradients without DDP; in an exact run after the last tile's backward pass."""
        trainable = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        sums = self.unwrapped = GradientSums(trainable, self.world)
        sums.on_ready = self._gradients_ready
        if tiles is not None:
            tiles.unwrapped = sums
            return
        self.no_sync = sums.no_sync
        self.backward = sums.backward

    def _gradients_ready(self) -> None:
        self.buckets.on_ready()

    def release(self) -> None:
        """Take part in the sums that other ranks wait for, without gradients: this rank's memory did not suffice."""
        if self.unwrapped is not None:
            self.unwrapped.release(integers=self.buckets.sums is not None)
        else:
            self.buckets.release()

    def close(self) -> None:
        """Remove the hooks that are in the parameters."""
        if self.unwrapped is not None:
            self.unwrapped.close()

    def compile(self, exact: bool) -> None:
        """Compile the objective; after `warm_up`, whose batch has a size of its own.

        In an exact run the objective is compiled inside DDP: one graph, the same on any world. Otherwise DDP is
        compiled too, and its graph is cut where a bucket of gradients is complete.
        """
        if self._fully is not None:
            self._fully.compile()
        elif exact:
            self.objective.compile(dynamic=False)  # a graph for any shape could replace that of one shape
        else:
            self.forward = torch.compile(self.forward)

    def _wrap(self, objective: Objective, world: World, static_graph: bool, bucket_mb: int) -> DistributedDataParallel:
        own_statistics = any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm | TileBatchNorm) for m in objective.modules()
        )
        ddp = DistributedDataParallel(
            objective,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
            # A static graph finds unused parameters by itself, but its hooks do not go together with compiled graphs,
            # which Dynamo cuts at bucket borders so that communication still overlaps with the backward pass.
            static_graph=static_graph,
            **{_SYNC_BUFFERS: own_statistics},  # type: ignore[arg-type]
        )
        ddp.register_comm_hook(self.buckets, _sum_bucket)
        return ddp

    def warm_up(
        self, micro: MicroBatch, per_sample: dict[str, Tensor] | None, autocast: AbstractContextManager[Any]
    ) -> None:
        """Make passes, forward and backward, that change neither weights nor buffers nor generators."""
        self.model.train()
        with self.unchanged():
            for _ in range(1 if self.unwrapped else 3):
                with autocast:
                    total, *_ = self.forward(micro.batch, micro.epochs, micro.indices, per_sample)
                (total * 0).backward()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back, after the block, what passes in it do to gradients, buffers and generators."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for parameter in parameters:
            parameter.grad = None
        try:
            with torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else []):
                yield
        finally:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


@torch.no_grad()
def make_equal(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for tensor in model.state_dict().values() if world.size > 1 else ():
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def explain(error: RuntimeError, remedy: str) -> RunFailed | None:
    """Return what DDP means in plain words, None for other errors; `remedy` is how to train all the same."""
    if "training graph has changed" in str(error) or "were not used in producing loss" in str(error):
        return RunFailed(
            "parameters of the model take part in the loss only in some steps, or only on some ranks, or never, and "
            f"DDP expects the same ones in each step; {remedy}"
        )
    return None


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a model sums its gradients by itself."""
    return isinstance(model, DistributedDataParallel)
