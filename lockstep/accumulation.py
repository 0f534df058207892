"""The gradients of a step in a loop of one's own, from a loss that can be called again for each micro-batch.

    run.accumulate(step, lambda batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])))

A step is done again, on all ranks, in smaller micro-batches when one of them is out of memory; and in an exact run on
a coarser grid when its gradients did not fit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .batchnorm import SyncBatchNorm, has_batch_norm
from .exact import ExactSums, plain_errors
from .feed import Step
from .gradients import Gradients, on_device
from .loss import Finished, Normalizer
from .registered import Registered

LossOf = Callable[[Any], tuple[Tensor, float | Tensor]]
"""Return, for the batch of a micro-batch, the sum of the loss over its elements and how many there are."""


def check_exact(objects: Mapping[str, Any]) -> None:
    """Refuse models whose bits would depend on the ranks although their gradients are summed exactly."""
    for name, found in objects.items():
        if hasattr(found, "_orig_mod"):
            raise ValueError(f"exact=True: {name} is compiled; register and call the plain model")
        if not isinstance(found, nn.Module):
            continue
        if has_batch_norm(found):
            raise ValueError(
                f"exact=True: {name} has BatchNorm, whose statistics depend on the ranks in a loop of your own; use "
                "GroupNorm or LayerNorm, or a recipe with --exact"
            )
        for path, parameter in found.named_parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"exact=True: {name}.{path} is {str(parameter.dtype).removeprefix('torch.')}; exact sums are of "
                    "float32 parameters (autocast in the loss may compute in bf16)"
                )


class Accumulation:
    """Sums gradients over the micro-batches of a step and the ranks, and does it again where that is necessary."""

    def __init__(self, gradients: Gradients, registered: Registered, exact: bool):
        self.gradients, self.registered, self.world, self.exact = gradients, registered, gradients.world, exact
        self.grids: dict[str, ExactSums] = {}
        """Of an exact run: the sums of each loss, by its name."""
        self._checked = set[str]()
        """The losses that are known to leave buffers alone."""
        gradients.exact = exact

    def run(self, step: Step, loss: LossOf, name: str) -> None:
        """Add to `.grad` the gradient of the mean loss over the global batch of a step."""
        self.gradients.check_parameters("accumulate")
        before = self.gradients.exchange([None] * len(self.gradients.sums.parameters))
        buffers = [(buffer, buffer.clone()) for m in self.registered.models.values() for buffer in m.buffers()]
        attempt = self._sum_exactly if self.exact else self._sum
        while (done := attempt(step, loss, name)) is None:
            for buffer, value in buffers:
                buffer.copy_(value)
            step.halve()
        normalizer, finished = done
        self.gradients.finish(normalizer, before)
        self.gradients.log(name, finished)

    def _sum(self, step: Step, loss: LossOf, name: str) -> "Pass | None":
        """Return what went through the model, with gradients summed over the ranks; None if memory did not suffice."""
        done = self._pass(step, loss, None)
        if self.world.any(done is None):
            return None
        self.gradients.sums.sum_all()
        return done

    def _sum_exactly(self, step: Step, loss: LossOf, name: str) -> "Pass | None":
        """Do the same on a grid; the first step of a loss is made twice, as its gradients are measured first."""
        sums, batching = self._sums(name), step.feed.batching
        assert batching is not None
        sums.set_tiles(batching.tiles or 1)
        buffers = None if name in self._checked else self._buffers()
        with plain_errors():
            if not sums.known:
                if self.world.any(self._pass(step, loss, sums, measure=True) is None):
                    return None
                sums.set_grid()
            while True:
                done = self._pass(step, loss, sums)
                if self.world.any(done is None):
                    return None
                if buffers is not None:
                    self._check_buffers(buffers)
                    self._checked.add(name)
                self.gradients.sums.sum_integers()
                sums.finish_step()
                if not sums.overflowed():
                    return done

    def _sums(self, name: str) -> ExactSums:
        if name not in self.grids:
            self.grids[name] = ExactSums(self.gradients.sums.parameters, self.world)
        return self.grids[name]

    def _pass(self, step: Step, loss: LossOf, sums: ExactSums | None, measure: bool = False) -> "Pass | None":
        """Run forward and backward of this rank's micro-batches; None if it is out of memory.

        `sums`: of an exact run; what takes their tiles. `measure`: leave no gradients, but only how large they were.
        """
        self.gradients.exchange([None] * len(self.gradients.sums.parameters))
        if sums is not None:
            sums.start_step()
        normalizer: Normalizer | None = None
        finished = list[Finished]()
        try:
            for micro in step.again():
                total, weight = _checked(loss(micro.batch))
                assert step.feed.batching is not None
                normalizer = normalizer or self.gradients.normalizer(total, step.feed.batching)
                with self.gradients.sums.no_sync():
                    self.gradients.sums.backward(normalizer.scale(total, weight, micro.number, len(micro.indices)))
                if sums is not None:
                    sums.add_local(last=micro.last and not measure)
                finished.append(Finished(micro.samples, total.detach(), weight, {}))
        except torch.OutOfMemoryError:
            if any(isinstance(m, SyncBatchNorm) for model in self.registered.models.values() for m in model.modules()):
                raise  # other ranks wait in the middle of a forward pass: no agreement is possible there
            return None
        assert normalizer is not None
        return normalizer, finished

    def _buffers(self) -> dict[str, Tensor]:
        models = self.registered.models.items()
        return {f"{name}.{path}": buffer.clone() for name, model in models for path, buffer in model.named_buffers()}

    def _check_buffers(self, before: dict[str, Tensor]) -> None:
        """Refuse a forward pass that changes a buffer; each rank's tiles would differ."""
        for path, buffer in self._buffers().items():
            if not torch.equal(buffer.nan_to_num(), before[path].nan_to_num()):
                raise ValueError(
                    f"exact=True: the loss changes the buffer {path}, which would depend on the tiles of a rank; "
                    "change it once for all ranks, after run.accumulate()"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Return the grid of each loss, for a checkpoint."""
        return {name: sums.exponents for name, sums in self.grids.items() if sums.known}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the grids of a checkpoint."""
        for name, exponents in tensors.items():
            self._sums(name).load_state_dict({"exponents": exponents})


Pass = tuple[Normalizer, list[Finished]]
"""What divides the gradients, and the micro-batches that went through the model."""


def _checked(found: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and found[0].numel() == 1):
        raise ValueError(
            "the loss given to run.accumulate() returns (total, weight): the sum over the elements of a batch, a "
            "tensor with one number, and how many elements there are"
        )
    return found[0], on_device(found[1], found[0])
