"""Gradients of means over the global batch, for a loop that calls backward itself.

gradients = Gradients(model.parameters(), world)
gradients.backward(total, weight)                 `.grad` is that of total / weight, both summed over all ranks
optimizer.step()

Gradients that `.grad` holds already stay and are added to, as always in PyTorch: several losses, several optimizers
and parameters that take part only in some steps need no more than that.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .batching import Batching, MicroBatch
from .distributed import World
from .gradient_sums import GradientSums
from .loss import ExactLossSums, Finished, LossSums, Normalizer
from .stream import Slice

Grads = list[Tensor | None]


class Accumulated:
    """One loss, in the middle of a step: what its micro-batches so far have added up to, on this rank."""

    def __init__(self, normalizer: Normalizer, parameters: int):
        self.normalizer, self.grads = normalizer, Grads([None] * parameters)
        self.numbers: set[int] = set()


class Gradients:
    """The gradients of some parameters, summed over micro-batches and ranks and divided by the global weight."""

    def __init__(self, parameters: Iterable[nn.Parameter], world: World):
        self.world, self.sums = world, GradientSums(parameters, world)
        self.exact = False
        """Whether sums are exact: those of gradients are then made tile by tile, in accumulation.py."""
        self._called = False
        self._losses: dict[str, Accumulated] = {}
        self._logged: dict[str, LossSums] = {}

    def backward(
        self, total: Tensor, weight: float | Tensor, name: str = "loss", batching: Batching | None = None,
        micro: MicroBatch | None = None,
    ) -> None:  # fmt: skip
        """Run backward and, at the last micro-batch of a step, sum over the ranks and divide. Every rank calls this.

        `micro`: of several micro-batches in a step, the one that `total` and `weight` are of.
        """
        self.check_parameters("backward")
        if self.exact:
            raise ValueError("a Run with exact=True sums gradients in run.accumulate(step, loss), not run.backward()")
        number, last, samples = (micro.number, micro.last, micro.samples) if micro else (0, True, _NO_SAMPLES)
        loss = self._losses.get(name) or self._start(name, total, batching)
        if number in loss.numbers:
            raise ValueError(
                f"run.backward() was called twice for one micro-batch with the loss {name!r}; give each loss a name of "
                'its own: run.backward(total, weight, "regularizer")'
            )
        loss.numbers.add(number)
        weight = on_device(weight, total)
        finished = self.exchange(loss.grads)
        with nullcontext() if last else self.sums.no_sync():
            self.sums.backward(loss.normalizer.scale(total, weight, number, len(samples.index)))
        self.log(name, [Finished(samples, total.detach(), weight, {})])
        if not last:
            loss.grads = self.exchange(finished)
            return
        del self._losses[name]
        self.finish(loss.normalizer, finished)

    def check_parameters(self, method: str) -> None:
        if not self.sums.parameters:
            raise ValueError(
                f"run.{method}() sums gradients of registered models, and there is none: Run(..., model=model)"
            )

    def _start(self, name: str, total: Tensor, batching: Batching | None) -> Accumulated:
        normalizer = self.normalizer(total, batching or _ONE_SAMPLE)
        self._losses[name] = Accumulated(normalizer, len(self.sums.parameters))
        return self._losses[name]

    def normalizer(self, total: Tensor, batching: Batching) -> Normalizer:
        """Return what divides the gradients of a loss whose totals are like this one."""
        return Normalizer(None, self.world, batching, 0, torch.promote_types(total.dtype, torch.float32))

    def log(self, name: str, finished: list[Finished]) -> None:
        """Count micro-batches in the mean of a loss."""
        self._logged.setdefault(name, ExactLossSums() if self.exact else LossSums()).add(finished)
        self._called = True

    def exchange(self, grads: Grads) -> Grads:
        """Give the parameters these gradients; return those that they had."""
        had = [parameter.grad for parameter in self.sums.parameters]
        for parameter, grad in zip(self.sums.parameters, grads, strict=True):
            parameter.grad = grad
        return had

    @torch.no_grad()
    def finish(self, normalizer: Normalizer, before: Grads) -> None:
        """Divide the summed gradients, and add those that the parameters had before."""
        factor = normalizer.gradient_factor()
        assert factor is not None  # all weights are tensors here
        factor = torch.where(torch.isinf(factor), 0.0, factor)  # no element in the whole global batch: a sum of nothing
        new = [parameter.grad for parameter in self.sums.parameters if parameter.grad is not None]
        if new:
            torch._foreach_mul_(new, factor)
        for parameter, grad in zip(self.sums.parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    @property
    def complete(self) -> bool:
        """Whether `backward` was called in this step, and for the last micro-batch."""
        return self._called and not self._losses

    def end_step(self) -> None:
        """Check that no loss of the step that ends waits for its last micro-batch."""
        waiting, self._losses, self._called = list(self._losses), {}, False
        if waiting:
            raise ValueError(
                f"run.backward() was not called for the last micro-batch of a step with the loss {waiting[0]!r}; call "
                "it for every micro-batch, with a total of 0 where there is nothing"
            )

    def means(self) -> dict[str, float]:
        """Return the mean of each loss since the last call, over all ranks; this waits for the device."""
        logged, self._logged = self._logged, {}
        return {name: logged[name].means(self.world)["loss"] for name in sorted(logged)}


_NO_SAMPLES = Slice(*torch.zeros(2, 0, dtype=torch.int64).numpy())
_ONE_SAMPLE = Batching(dataset=1, micro_batch=1, accumulation=1, world=1, global_batch=1, n_steps=1)


def on_device(weight: float | Tensor, total: Tensor) -> Tensor:
    """Return a weight as a tensor beside the total, without waiting for the device."""
    if isinstance(weight, Tensor):
        return weight.detach().to(total.device)
    return torch.full((), weight, dtype=torch.float64, device=total.device)
