"""Shadow weights: an exponential moving average of the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """An average of the weights with decay min(decay, (1 + n) / (10 + n)) at update n, so that it starts fast."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: tied weights are averaged and swapped once
        for name, live in model.state_dict().items():  # state_dict gives the model's own tensors, not copies
            pair = self._pairs.setdefault(live.data_ptr() or id(live), (live.clone(), live))
            self.shadow[name] = pair[0]
        pairs = self._pairs.values()
        self._floats = [pair[0] for pair in pairs if pair[0].is_floating_point()]
        self._live_floats = [pair[1] for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Move towards the model's weights; `n` counts updates from 0."""
        torch._foreach_lerp_(self._floats, self._live_floats, 1 - min(self.decay, (1 + n) / (10 + n)))
        for shadow, live in self._counters:
            shadow.copy_(live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.shadow.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        for shadow, live in self._pairs.values():
            kept = live.clone()
            live.copy_(shadow)
            shadow.copy_(kept)
