"""One objective on many ranks: gradients synchronised, BatchNorm statistics over all ranks.

The only file that names DistributedDataParallel.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .activity import Activity
from .batching import MicroBatch
from .distributed import World
from .loss import Objective

# The option that broadcasts buffers at every forward pass has another name since torch 2.13.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class Buckets:
    """The gradient buckets of one step. It holds no reference to the replica, or DDP would never be freed."""

    def __init__(self) -> None:
        self.issued = 0
        """How many all-reduces this step has issued; the step sets it to 0 at its start."""
        self.layout: dict[int, Tensor] = {}
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
    buckets.layout[bucket.index()] = bucket.buffer().detach()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Replica:
    """This rank's copy of the objective, as the step uses it.

    Gradients are summed over the ranks bucket by bucket, while backward is still running. DDP records its first
    passes: a static graph must be synchronised in the first one, and the buckets are rebuilt after it, which changes
    the order of summation. So that a resumed run has the bits of one that never stopped, `warm_up` makes two passes
    before the first step and throws them away.
    """

    def __init__(self, objective: Objective, world: World, compile: bool):
        self.model, self.world = objective.model, world
        self.eager_forward: Callable[..., Any] = objective
        self.no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Within it, backward adds up gradients on this rank alone."""
        self.buckets = Buckets()
        if world.size > 1:
            self.eager_forward = ddp = self._wrap(objective, world, static_graph=not compile)
            self.no_sync = ddp.no_sync
        self.forward: Callable[..., Any] = torch.compile(self.eager_forward) if compile else self.eager_forward
        """Call this, never the objective itself: gradients are synchronised on the way back."""

    def _wrap(self, objective: Objective, world: World, static_graph: bool) -> DistributedDataParallel:
        own_statistics = any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in objective.modules()
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
        """Make two passes, forward and backward, that change neither weights nor buffers nor generators."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.train()
        with torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else []):
            for _ in range(2):
                with autocast:
                    total, *_ = self.eager_forward(micro.batch, micro.epochs, micro.indices, per_sample)
                (total * 0).backward()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])


class _Sum(torch.autograd.Function):
    """A sum over ranks whose gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, activity: Activity) -> Tensor:
        ctx.activity, tensor = activity, tensor.clone(memory_format=torch.contiguous_format)
        with activity.waiting():
            dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.activity), None


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of all ranks' samples together, on any backend, whatever each rank holds.

    torch's own has no CPU kernel. Mean and variance take one small all-reduce each, and so do their gradients.
    """

    activity: Activity
    """Where the time spent waiting for other ranks is counted."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes (samples, channels, ...), not {input.dim()} dimension(s)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return self._local(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        channel = [1, -1] + [1] * (x.dim() - 2)
        others = [d for d in range(x.dim()) if d != 1]
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
        sums = _Sum.apply(torch.cat([x.sum(others), count]), self.activity)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(channel)
        variance = _Sum.apply(centred.square().sum(others), self.activity) / count
        self._track(mean.detach(), variance.detach(), count)
        y = centred * (variance + self.eps).rsqrt().view(channel)
        if self.affine:
            y = y * self.weight.view(channel) + self.bias.view(channel)
        return y.to(input.dtype)

    def _local(self, input: Tensor) -> Tensor:
        by_batch = self.training or self.running_mean is None
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, by_batch, momentum, self.eps
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_mean += rate * (mean - self.running_mean)
        self.running_var += rate * (unbiased - self.running_var)


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def sync_batch_norm(model: nn.Module, activity: Activity | None = None) -> None:
    """Replace every BatchNorm of the model by a SyncBatchNorm; names and weights stay."""
    activity = activity or Activity()
    for name, child in list(model.named_children()):
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
            tracked = child.track_running_stats
            synced = SyncBatchNorm(child.num_features, child.eps, child.momentum, child.affine, tracked)
            synced.activity = activity
            synced._parameters, synced._buffers, synced.training = child._parameters, child._buffers, child.training
            setattr(model, name, synced)
        else:
            sync_batch_norm(child, activity)
