"""One model on many ranks, with gradients summed over all of them: as an objective, or in a loop of one's own.

The only file that names DistributedDataParallel.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from .loss import Objective

# The option that broadcasts buffers at every forward pass has another name since torch 2.13.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class Buckets:
    """The gradient buckets of one step. It holds no reference to the replica, or DDP would never be freed."""

    def __init__(self, sums: ExactSums | None) -> None:
        self.sums = sums
        self.issued = 0
        """How many all-reduces this step has issued; the step sets it to 0 at its start."""
        self.layout: dict[int, Tensor] = {}
        """By number of the bucket, the tensor that is all-reduced."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called whenever a bucket is ready to be summed."""

    def release(self) -> None:
        """Issue the all-reduces that are missing, with zeros: other ranks wait for gradients this rank cannot make."""
        for number in sorted(self.layout)[self.issued :]:
            dist.all_reduce(torch.zeros_like(self.layout[number]))


def _sum_bucket(buckets: Buckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: sum a bucket over the ranks (loss.py divides) and remember its shape."""
    buckets.issued += 1
    buckets.on_ready()
    summed = bucket.buffer().detach()
    if buckets.sums is not None:
        numbers = [buckets.sums.number[parameter] for parameter in bucket.parameters()]
        gradients = list(zip(numbers, bucket.gradients(), strict=True))
        buckets.sums.add(gradients, last=True)
        if buckets.sums.observer is not None:
            buckets.sums.observer.add_sums([(i, gradient.view(torch.int32)) for i, gradient in gradients])
        summed = summed.view(torch.int32)
    buckets.layout[bucket.index()] = summed
    work = dist.all_reduce(summed, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].view(bucket.buffer().dtype))


class Tiles:
    """What an exact run collects tile by tile: sums of gradients, and statistics of BatchNorm."""

    def __init__(self, model: nn.Module, sums: ExactSums, count: int, world: World):
        self.sums, self.statistics, self.world = sums, TileStatistics(model, count, world), world
        self._model, self._buffers = model, {name: buffer.clone() for name, buffer in _own_buffers(model)}
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
        if not last or self.world.size == 1:
            self.sums.add_local(last)

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
    before the first step and throws them away.
    """

    def __init__(self, objective: Objective, world: World, static_graph: bool, tiles: Tiles | None = None):
        self.objective, self.model, self.world = objective, objective.model, world
        self.forward: Callable[..., Any] = objective
        """Call this, never the objective itself: gradients are synchronised on the way back."""
        self.no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Within it, backward adds up gradients on this rank alone."""
        self.buckets = Buckets(tiles.sums if tiles else None)
        if world.size > 1:
            self.forward = ddp = self._wrap(objective, world, static_graph)
            self.no_sync = ddp.no_sync

    def compile(self, exact: bool) -> None:
        """Compile the objective; after `warm_up`, whose batch has a size of its own.

        In an exact run the objective is compiled inside DDP: one graph, the same on any world. Otherwise DDP is
        compiled too, and its graph is cut where a bucket of gradients is complete.
        """
        if exact:
            self.objective.compile(dynamic=False)  # a graph for any shape could replace that of one shape
        else:
            self.forward = torch.compile(self.forward)

    def _wrap(self, objective: Objective, world: World, static_graph: bool) -> DistributedDataParallel:
        own_statistics = any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm | TileBatchNorm) for m in objective.modules()
        )
        ddp = DistributedDataParallel(
            objective,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
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
        """Make three passes, forward and backward, that change neither weights nor buffers nor generators."""
        self.model.train()
        with self.unchanged():
            for _ in range(3):
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


class GradientSums:
    """Sums the gradients of any parameters over the ranks, when backward is done.

    No wrapper is around a model, so that nothing can run around it: any method may be called, any number of times and
    with any losses, and parameters may take part only in some steps or on some ranks. The price is that nothing is sent
    while backward is still running, as DDP does.
    """

    BUCKET = 25 << 20
    """Bytes that are summed at a time, as in DDP."""

    def __init__(self, parameters: Iterable[nn.Parameter], world: World):
        self.parameters, self.world = list(dict.fromkeys(parameters)), world

    def sum_over_ranks(self) -> None:
        """Replace each gradient by the sum of all ranks'; it stays None where no rank has one."""
        if self.world.size == 1:
            return
        grads = [self._dense(parameter) for parameter in self._with_gradient()]
        sent: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        for bucket in self._buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if len(sent) > 1:  # one is on its way while the next is copied
                _copy_back(*sent.pop(0))
        for waiting in sent:
            _copy_back(*waiting)

    def _with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any rank; a message between hosts."""
        have = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.uint8)
        dist.all_reduce(have, dist.ReduceOp.MAX, group=self.world.cpu_group)
        return [parameter for parameter, some in zip(self.parameters, have.tolist(), strict=True) if some]

    def _dense(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise ValueError("sparse gradients are not summed over ranks: use nn.Embedding(..., sparse=False)")
        return parameter.grad

    def _buckets(self, grads: list[Tensor]) -> list[list[Tensor]]:
        """Return the gradients in groups of one type, each of about BUCKET bytes; the same on every rank."""
        buckets: list[list[Tensor]] = []
        filled: dict[torch.dtype, tuple[list[Tensor], int]] = {}
        for grad in grads:
            bucket, size = filled.get(grad.dtype, ([], self.BUCKET))
            if size >= self.BUCKET:
                bucket, size = [], 0
                buckets.append(bucket)
            bucket.append(grad)
            filled[grad.dtype] = bucket, size + grad.nbytes
        return buckets


def _copy_back(grads: list[Tensor], flat: Tensor, work: dist.Work) -> None:
    work.wait()
    pieces = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)])


@torch.no_grad()
def make_equal(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for tensor in model.state_dict().values() if world.size > 1 else ():
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.copy_(whole)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a model sums its gradients by itself."""
    return isinstance(model, DistributedDataParallel)
