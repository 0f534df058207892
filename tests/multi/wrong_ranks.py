"""Faults that tests of spot checks cause in one rank: `fault(run, due)`, which happens whenever `due()` is true."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tiny import Points
from torch import Tensor

from lockstep import Trainer


def flip(tensor: Tensor, bit: int = 12) -> None:
    """Flip one bit of the element in the middle, in place."""
    tensor.detach().view(-1)[tensor.numel() // 2 :][:1].view(torch.int32).bitwise_xor_(1 << bit)


def activation(run: Trainer, due: Callable[[], bool]) -> None:
    """Flip a bit of an activation, another one each time: a device that fails now and then."""
    calls = iter(range(10**6))

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if not (module.training and due()):
            return None
        spoilt = output.clone()
        flip(spoilt, 5 + next(calls) % 15)
        return spoilt

    run.model[0].register_forward_hook(spoil)


def stuck_activation(run: Trainer, due: Callable[[], bool]) -> None:
    """The same bit of an activation is wrong each time."""

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if not (module.training and due()):
            return None
        spoilt = output.clone()
        flip(spoilt)
        return spoilt

    run.model[0].register_forward_hook(spoil)


def tile_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """The gradient of a tile, before it is added up."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        if due():
            flip(spoilt)
        return spoilt

    run.model[2].weight.register_hook(spoil)


def loss_weight(run: Trainer, due: Callable[[], bool]) -> None:
    """How many elements the loss of a tile is summed over; gradients are divided by it at the end."""
    forward = run.step.replica.forward

    def spoil(*arguments: Any) -> Any:
        total, weight, logs = forward(*arguments)
        return total, weight + due(), logs

    run.step.replica.forward = spoil


def term_count(run: Trainer, due: Callable[[], bool]) -> None:
    """How many elements a term of the loss is summed over; all ranks get a wrong sum over all tiles."""
    count = run.step.normalizer.term_counts

    def spoil(batch: Any, rng: Any) -> dict[str, Tensor]:
        return {name: found + due() for name, found in count(batch, rng).items()}

    run.step.normalizer.term_counts = spoil


def summed_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """What a rank has added up over its tiles, before the all-reduce."""
    add = run.state.sums.add

    def spoil(gradients: Any, last: bool) -> None:
        add(gradients, last)
        if last and due():
            flip(gradients[0][1])

    run.state.sums.add = spoil


def sent_gradient(run: Trainer, due: Callable[[], bool]) -> None:
    """The same while it is on its way: no rank can be named."""
    all_reduce = dist.all_reduce

    def spoil(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options.get("async_op") and tensor.dtype == torch.int32 and due():
            flip(tensor)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = spoil


def weights(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.model[2].weight))


def optimizer(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.update.optimizer.state[run.model[2].weight]["exp_avg"]))


def ema(run: Trainer, due: Callable[[], bool]) -> None:
    _before_step(run, due, lambda: flip(run.state.emas[0].shadow["2.weight"]))


def _before_step(run: Trainer, due: Callable[[], bool], spoil: Callable[[], None]) -> None:
    step = run.step.run

    def spoilt(stop_request: int = 0) -> int:
        if due():
            spoil()
        return step(stop_request)

    run.step.run = spoilt


def random_loss(run: Trainer, due: Callable[[], bool]) -> None:
    """No device is wrong, but the recipe: it draws random numbers that are not keyed."""
    forward = run.step.replica.forward

    def spoil(*arguments: Any) -> Any:
        total, weight, logs = forward(*arguments)
        return total * random.random(), weight, logs

    run.step.replica.forward = spoil


def counting_buffer(run: Trainer, due: Callable[[], bool]) -> None:
    """Ranks have different numbers of tiles, so a buffer that counts them differs."""
    run.model.register_buffer("calls", torch.zeros(()))
    run.step.build()
    run.model.register_forward_pre_hook(lambda *_: run.model.calls.add_(1) and None)


class RandomPoints(Points):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: value * random.random() for name, value in super().__getitem__(i).items()}


def random_data(run: Trainer, due: Callable[[], bool]) -> None:
    run.setup.data.__class__ = RandomPoints
