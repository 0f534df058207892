"""What is trained: a recipe with its flags, and its model, batches and loss for a loop that is not Lockstep's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .. import optim, precision
from ..config import TrainConfig
from ..distributed import pick_device
from ..flags import Request
from ..loader import default_workers, item_getter, to_device
from ..loss import Objective
from ..recipe import Augments, Recipe, SeveralTerms
from ..rng import Rng


@dataclass(frozen=True)
class Workload:
    """A recipe and the flags of `lockstep train`."""

    recipe: str
    flags: tuple[str, ...] = ()


WORKLOADS = {
    "dit-s": Workload("dit", ("--model", "DiT-S/2", "--batch_size", "128")),
    "dit-xl": Workload("dit", ("--model", "DiT-XL/2", "--batch_size", "64")),
    "jit-b": Workload("jit", ("--model", "JiT-B/4", "--img_size", "64", "--batch_size", "256")),
    "vision": Workload("vision", ("--batch_size", "32")),
    "vision-512": Workload("vision", ("--batch_size", "512")),
    "protein": Workload("protein", ("--batch_size", "4")),
    "protein-32": Workload("protein", ("--batch_size", "32")),
    "scribble": Workload("scribble"),
}
Keyed = tuple[Any, Tensor]
"""A batch and the indices of its samples."""


class Items(Dataset[Keyed]):
    """The recipe's training set, augmented, each item with its index."""

    def __init__(self, recipe: Recipe, data: Any, seed: int):
        self._items, self._size, self._seed = item_getter(data), len(data), seed
        self._augment = recipe.augment if isinstance(recipe, Augments) else None

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        items = self._items(list(indices))
        if self._augment is not None:
            keys = [Rng.of(self._seed, torch.zeros(1, dtype=torch.int64), torch.tensor([i])) for i in indices]
            items = [self._augment(item, key) for item, key in zip(items, keys, strict=True)]
        return list(zip(items, indices, strict=True))


class Work:
    """A workload in pieces, for one process and one device: every contender but Lockstep itself is made of them."""

    def __init__(self, request: Request):
        self.config: TrainConfig = request.train
        self.device = pick_device(self.config.hardware.device, 0)
        self.precision = precision.choose(self.config.hardware, self.device)
        self.compiles = {"auto": self.device.type == "cuda", "on": True, "off": False}[self.config.hardware.compile]
        seed = self.config.data.seed
        torch.manual_seed(seed)
        self.recipe = request.recipe(request.options)
        self.recipe.optim = self.config.optim
        if request.smoke:
            self.recipe.smoke()
        self.data = self.recipe.dataset("train")
        self.recipe.n_steps, self.recipe.step = 1_000, torch.zeros((), dtype=torch.int64, device=self.device)
        self.batch_size = min(self.config.data.batch_size, request.smoke or self.config.data.batch_size)
        torch.manual_seed(seed)
        self.objective: nn.Module = Objective(self.recipe.loss, self.recipe.model(), seed)
        self.objective.to(self.device, self.precision.dtype).train()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.objective.parameters() if parameter.requires_grad]

    def loader(self) -> DataLoader[Keyed]:
        """Return the recipe's data as a script would load it."""
        workers = self.config.data.num_workers
        workers = default_workers(self.device) if workers is None else workers
        return DataLoader(
            Items(self.recipe, self.data, self.config.data.seed),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            collate_fn=self._collate,
        )

    def _collate(self, pairs: list[tuple[Any, int]]) -> Keyed:
        return self.recipe.collate([item for item, _ in pairs]), torch.tensor([i for _, i in pairs])

    def loss(self, objective: Any, batch: Any, index: Tensor) -> Tensor:
        """Return the mean loss of a batch that is on the device."""
        epoch, per_sample = torch.zeros_like(index), None
        if isinstance(self.recipe, SeveralTerms):
            counts = self.recipe.term_counts(batch, Rng.of(self.config.data.seed, epoch, index))
            per_sample = {name: (count.clamp(min=1) / len(index)).float() for name, count in counts.items()}
        total, weight, _ = objective(batch, epoch, index, per_sample)
        return total / weight

    def to_device(self, keyed: Keyed) -> Keyed:
        """Return a batch on the device; copied while the host goes on, if its memory is pinned."""
        moved: Keyed = to_device(keyed, self.device, self.precision.dtype)
        return moved

    def optimizer(self, fused: bool) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, or one with torch's own defaults for speed."""
        own = self.recipe.optimizer(self.objective.model)  # type: ignore[arg-type]
        if own is not None:
            return own
        if fused:
            return optim.build(self.config.optim, self.parameters)
        o = self.config.optim
        if o.optimizer == "sgd":
            return torch.optim.SGD(self.parameters, o.lr, o.momentum, weight_decay=o.weight_decay)
        return torch.optim.AdamW(self.parameters, o.lr, (o.beta1, o.beta2), weight_decay=o.weight_decay)


class Averages:
    """Averages of the weights, as many as the recipe keeps."""

    def __init__(self, work: Work, foreach: bool):
        self.live, self.foreach = [p.detach() for p in work.parameters], foreach
        self.kept = [(decay, [p.clone() for p in self.live]) for decay in work.config.optim.ema_decay]

    @torch.no_grad()
    def update(self) -> None:
        for decay, shadows in self.kept:
            if self.foreach:
                torch._foreach_lerp_(shadows, self.live, 1 - decay)
            else:
                for shadow, live in zip(shadows, self.live, strict=True):
                    shadow.lerp_(live, 1 - decay)


def endless(loader: Any) -> Iterator[Any]:
    """Yield batches without end, epoch after epoch."""
    while True:
        yield from loader
