"""Gradients of any parameters, summed over the ranks without a wrapper around the model.

sums = GradientSums(model.parameters(), world)
with sums.no_sync():
    sums.backward(loss)                 all micro-batches but the last
sums.backward(loss)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .distributed import RunFailed, World


class Bucket:
    """Parameters of one type whose gradients are summed together."""

    BYTES = 25 << 20
    """About so many, as in DDP."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.size = 0
        self.waiting: set[nn.Parameter] = set()
        """In a backward pass that is running: those without their gradient yet."""
        self.sent: tuple[Tensor, dist.Work] | None = None

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.size += parameter.nbytes

    def start(self) -> None:
        self.waiting, self.sent = set(self.parameters), None

    def send(self, integers: bool = False) -> None:
        """Begin to sum the gradients; a rank without one has zeros. `integers`: their memory holds int32."""
        if any(p.grad is not None and p.grad.is_sparse for p in self.parameters):
            raise ValueError("sparse gradients are not summed over ranks: use nn.Embedding(..., sparse=False)")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([grad.detach().view(torch.int32 if integers else grad.dtype).reshape(-1) for grad in grads])
        self.sent = flat.view(grads[0].dtype), dist.all_reduce(flat, async_op=True)

    def receive(self, wanted: set[nn.Parameter]) -> None:
        """Give the wanted parameters the sums."""
        assert self.sent is not None
        (flat, work), self.sent = self.sent, None
        work.wait()
        for parameter, piece in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            if parameter in wanted and parameter.grad is None:
                parameter.grad = piece.view_as(parameter)
            elif parameter in wanted:
                parameter.grad.copy_(piece.view_as(parameter))  # type: ignore[union-attr]


class GradientSums:
    """Sums the gradients of any parameters over the ranks, bucket by bucket, while backward is still running.

    No wrapper is around a model, so that nothing can run around it: any method may be called, any number of times and
    with any losses, and parameters may take part only in some steps or on some ranks. Buckets are sent in one order on
    every rank; one that is not complete when backward ends, and those after it, are sent then. The layout of buckets is
    the same from the first step on, so that a resumed run has the bits of one that never stopped.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world: World):
        self.parameters, self.world = list(dict.fromkeys(parameters)), world
        self._running, self._started, self._sent, self._sync = False, False, 0, True
        self._wanted: set[nn.Parameter] | None = None
        """The parameters that have a gradient on any rank in this step, once that is known."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called whenever a bucket is ready to be summed."""
        self.buckets = self._cut() if world.size > 1 else []
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        trainable = [parameter for parameter in self._bucket_of if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in trainable]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _cut(self) -> list[Bucket]:
        """Return the buckets in the order in which backward mostly completes them; frozen parameters come last."""
        buckets: list[Bucket] = []
        filled: dict[Any, Bucket] = {}
        ordered = self.parameters[::-1]
        for parameter in sorted(ordered, key=lambda p: not p.requires_grad):
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            if kind not in filled or filled[kind].size >= Bucket.BYTES:
                filled[kind] = Bucket()
                buckets.append(filled[kind])
            filled[kind].add(parameter)
        return buckets

    def backward(self, loss: Tensor) -> None:
        """Run backward; each gradient is then the sum of all ranks', None where no rank has one."""
        if not self._sync or self.world.size == 1:
            if loss.requires_grad:
                loss.backward()
            return
        self._start()
        self._running = True
        try:
            if loss.requires_grad:  # else this rank has nothing to add
                loss.backward()
        finally:
            self._running = False
        self._finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let `backward` add up gradients on this rank alone, as DDP's `no_sync` does."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def sum_integers(self) -> None:
        """Sum what is in the gradients' memory as int32."""
        self.sum_all(integers=True)

    def sum_all(self, integers: bool = False) -> None:
        """Sum the gradients that are there, after the backward passes of a step."""
        if self.world.size > 1:
            self._start()
            self._finish(integers)

    def release(self, integers: bool) -> None:
        """Take part in the sums of a step in which this rank has no gradients, or not all of them."""
        if not self._started:
            self._start()
        self._finish(integers)

    def _start(self) -> None:
        for bucket in self.buckets:
            bucket.start()
        self._started, self._sent, self._wanted = True, 0, None

    def _finish(self, integers: bool = False) -> None:
        if self._wanted is None:  # else memory has run out in the middle of this, and `release` goes on with it
            self._wanted = self._with_gradient()
        wanted = self._wanted
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if not wanted.isdisjoint(bucket.parameters):
                self.on_ready()
                bucket.send(integers)
            self._sent += 1
        for bucket in self.buckets:
            if bucket.sent is not None:
                bucket.receive(wanted)
        self._started = False

    def _ready(self, parameter: Tensor) -> None:
        """Hook of a parameter: its gradient of this backward pass is there."""
        if not self._running:
            return
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if bucket.sent is not None:
            raise RunFailed(
                "a parameter got a gradient twice in one backward pass, as activation checkpointing does with "
                "use_reentrant=True; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.waiting.discard(parameter)
        while self._sent < len(self.buckets) and not self.buckets[self._sent].waiting:
            self.on_ready()
            self.buckets[self._sent].send()
            self._sent += 1

    def _with_gradient(self) -> set[nn.Parameter]:
        """Return the parameters that have a gradient on any rank; a message between hosts."""
        have = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.uint8)
        dist.all_reduce(have, dist.ReduceOp.MAX, group=self.world.cpu_group)
        return {parameter for parameter, some in zip(self.parameters, have.tolist(), strict=True) if some}
