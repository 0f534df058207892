"""What a recipe provides, and how one is found.

A recipe is all the science of a model family in one class. Three methods are required:

    class Mine(Recipe):
        def model(self): return MyNetwork()                 # plain single-device nn.Module
        def dataset(self, split): return MyData(split)      # map-style; None where there is no such split
        def loss(self, model, batch, rng):
            error = (model(batch["x"]) - batch["y"]).square()
            return Loss(total=error.sum(), weight=error.numel())

The rest has defaults. What the engine does with them, in order:

    model(), dataset("train"), optimizer()                  once
    begin(model)                                            once, in a run that does not resume another
    every step:         augment(item), collate(items) in the loader; loss() forward and backward; the update
    every eval_every:   evaluate_batch() on each batch of dataset("val"), summed over all ranks; metrics() of the sums
    every sample_every: sample() on each rank's share; save_samples() on rank 0
    every score_every:  score(), for values that need generated samples
    lockstep test:      test_batch(), metrics() on dataset("test"); save_test() on rank 0
    lockstep predict:   inputs(path); predict_batch() on each batch; save_predictions() on rank 0, in order
    lockstep data:      write_data(folder), the embedded data in the form that dataset() reads
"""

import difflib
import importlib.metadata
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .rng import Rng

Split = Literal["train", "val", "test"]
Batch = Any
"""What the data set's items collate to: tensors in dicts, tuples or lists."""

Sums = dict[str, Tensor | float]
Total = Callable[[int, int, Callable[[range, Rng], Sums]], dict[str, Tensor]]
"""total(count, batch_size, part): `part(numbers, rng)` for all of 0 … count-1, shared out over ranks and added up."""

ENTRY_POINTS = "lockstep.recipes"


class Loss:
    """A loss as a sum and what it is summed over, so that ranks and micro-batches can be added up rightly.

    `total` is the sum over elements, `weight` how many elements there are: a Python number if it is proportional to
    the number of samples (all pixels of all images), a tensor if it depends on the data (pixels that have a label).
    `logs` are further sums over the same elements. The engine divides by the weight of the global batch.

    A loss of several terms, each a mean over elements of its own (pixels with a scribble, pixels near one), is
    `Loss.of_terms(scribble=total, near=total)`, each total already times its coefficient; `Recipe.weigh` says, by
    the same names, how many elements there are.
    """

    def __init__(self, total: Tensor, weight: float | Tensor, **logs: Tensor):
        self.total = total
        self.weight = weight
        self.logs = logs
        self.terms: dict[str, Tensor] = {}

    @classmethod
    def of_terms(cls, **terms: Tensor) -> "Loss":
        loss = cls(torch.stack(list(terms.values())).sum(), 1.0)
        loss.terms = terms
        return loss


@dataclass
class NoOptions:
    """A recipe without flags of its own."""


class Recipe(ABC):
    """The science of one model family. Subclass it, or see `lockstep/recipes`."""

    name: ClassVar[str] = ""
    """What runs of it are called; by default the name it is found under."""
    spec: ClassVar[str] = ""
    """How it is found: its name, or file.py:Class."""
    Options: ClassVar[type] = NoOptions
    """A dataclass: the flags of this recipe. Its values are in `self.options`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Engine settings that this recipe wants by default, by flag name."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of flags for `--preset NAME`."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names for flags, beside those that every recipe understands; dots for nested YAML keys (`ddp.enabled`)."""

    def __init__(self, options: Any = None):
        self.options: Any = self.Options() if options is None else options

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, on the CPU, freshly initialised. The global generator is seeded before the call."""

    @abstractmethod
    def dataset(self, split: Split) -> Any | None:
        """A map-style data set (`__len__`, and `__getitem__` or `__getitems__`), or None if there is no such split."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        """The objective on one micro-batch. All randomness comes from `rng`."""

    def weigh(self, batch: Batch, rng: Rng) -> dict[str, Tensor] | None:
        """For a loss of several terms: how many elements this micro-batch has of each; `rng` as in `loss`.

        It must follow from the batch and the randomness alone: the engine adds it up over the global batch before the
        first forward pass.
        """
        return None

    def begin(self, model: nn.Module) -> str | None:
        """Load what a new run starts from (pretrained weights, say) into the model; a remark for the receipt."""
        return None

    def collate(self, items: list[Any]) -> Batch:
        """Items to a batch; override where they differ in size."""
        return default_collate(items)

    def costs(self, dataset: Any) -> Sequence[float] | None:
        """What each sample of the training set costs to compute, for ranks to share a global batch evenly by it."""
        return None

    def augment(self, item: Any, rng: Rng) -> Any:
        """Change one training item in the loader; `rng` holds one key."""
        return item

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer of your own, or None for the one that the flags describe."""
        return None

    def evaluate_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        """What to add up over the set: sums and counts of any shape. Integers add up exactly."""
        loss = self.loss(model, batch, rng)
        if loss.terms:
            weights = self.weigh(batch, rng) or {}
            totals: Sums = {f"total {name}": total for name, total in loss.terms.items()}
            return totals | {f"weight {name}": weights[name] for name in loss.terms}
        return {"total": loss.total, "weight": loss.weight}

    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """The sums over the whole set, turned into named values."""
        if "total" in sums:
            return {"loss": float(sums["total"] / sums["weight"])}
        names = [name.removeprefix("total ") for name in sums if name.startswith("total ")]
        terms = {name: float(sums[f"total {name}"] / sums[f"weight {name}"].clamp(min=1)) for name in names}
        return {"loss": sum(terms.values()), **terms}

    def test_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        """What `lockstep test` adds up, where that takes more care than an evaluation on the way."""
        return self.evaluate_batch(model, batch, rng)

    def save_test(self, sums: dict[str, Tensor], values: dict[str, float], folder: Path) -> list[Path]:
        """Write what a person would look at after a test: tables, plots; the files written."""
        return []

    def inputs(self, path: Path) -> Any:
        """A map-style data set of what a user wants predicted: a file or a folder, in sorted order."""
        raise ValueError(f"the recipe {type(self).__name__} predicts nothing")

    def predict_batch(self, model: nn.Module, batch: Batch) -> list[Any]:
        """One entry for each sample of the batch: tensors, numbers, or a dict of them."""
        raise ValueError(f"the recipe {type(self).__name__} predicts nothing")

    def save_predictions(self, predictions: list[Any], dataset: Any, folder: Path) -> list[Path]:
        """Write the predictions for `inputs`, in their order; the files written, the best one first."""
        raise ValueError(f"the recipe {type(self).__name__} predicts nothing")

    @property
    def score_every(self) -> int:
        """Steps between two calls of `score`; a run at least that long ends with one. 0: never."""
        return 0

    def score(self, model: nn.Module, total: Total, folder: Path) -> tuple[dict[str, float], str | None]:
        """Values that need generated samples, and a remark (what is missing, say). `folder` is for what is cached."""
        return {}, None

    def write_data(self, folder: Path) -> str:
        """Write the embedded data as files that `dataset` reads; a line that says what is there now."""
        raise ValueError(f"the recipe {type(self).__name__} has no data to write")

    def galleries(self) -> dict[str, dict[str, Any]]:
        """Pictures to make while training: name -> the keyword arguments of `sample`, and `n`, how many samples."""
        return {}

    def sample(self, model: nn.Module, index: Tensor, rng: Rng, **settings: Any) -> Tensor:
        """Generate the samples numbered `index` (n,): one row each. `rng` is keyed by these numbers."""
        raise ValueError(f"the recipe {type(self).__name__} generates nothing")

    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        """Write generated samples beside `path` (which has no ending); the files written, the best one first."""
        raise ValueError(f"the recipe {type(self).__name__} generates nothing")

    def smoke(self) -> None:
        """Make everything that costs time small: the run only shows that all parts work."""

    def describe_model(self, model: nn.Module) -> str:
        """A few words for the receipt: what is trained."""
        return type(model).__name__

    def describe_data(self, split: Split) -> str:
        """A few words for the receipt: where the data come from."""
        return ""


class Objective(nn.Module):
    """The module that the engine wraps and compiles: the model, and as its forward the recipe's loss."""

    def __init__(self, recipe: Recipe, model: nn.Module, seed: int):
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.seed = seed

    def forward(
        self, batch: Batch, epoch: Tensor, index: Tensor, per_sample: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, float | Tensor, dict[str, Tensor]]:
        """`per_sample`: of each term of a loss of several, the elements in the global batch by its samples."""
        loss = self.recipe.loss(self.model, batch, Rng.of(self.seed, epoch, index))
        if not loss.terms:
            return loss.total, loss.weight, loss.logs
        if per_sample is None or per_sample.keys() != loss.terms.keys():
            raise ValueError(f"the loss has the terms {', '.join(loss.terms)}: weigh() has to name the same")
        terms = {name: total / per_sample[name] for name, total in loss.terms.items()}
        return torch.stack(list(terms.values())).sum(), len(index), terms


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """The recipes that installed packages announce, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def find(name: str) -> type[Recipe]:
    """The recipe class called `name`: an installed one, or `path/to/file.py:Class`."""
    if ".py" in name:
        return _from_file(name)
    points = installed()
    if name not in points:
        raise ValueError(f"there is no recipe {name!r}{nearest(name, points)}; `lockstep recipes` lists them")
    return introduce(points[name].load(), name, name)


def _from_file(name: str) -> type[Recipe]:
    file, _, wanted = name.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {file} to take a recipe from")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # what the file imports lies beside it, as in `python file.py`
    spec.loader.exec_module(module)
    classes = {
        k: v
        for k, v in vars(module).items()
        if isinstance(v, type) and issubclass(v, Recipe) and v.__module__ == path.stem
    }
    if not wanted and len(classes) == 1:
        wanted = next(iter(classes))
    if wanted not in classes:
        have = ", ".join(classes) or "none"
        raise ValueError(f"say which recipe of {file} to train, as {file}:Class; it holds: {have}")
    return introduce(classes[wanted], path.stem, f"{path}:{wanted}")


def introduce_from(recipe: type[Recipe], script: Path) -> type[Recipe]:
    """The same for a class that a script trains: an installed recipe, or one from the file that defines it."""
    for name, point in installed().items():
        module, _, attribute = point.value.partition(":")
        if attribute == recipe.__name__ and f"{recipe.__module__}.".startswith(f"{module}."):
            return introduce(recipe, name, name)
    file = Path(getattr(sys.modules.get(recipe.__module__), "__file__", None) or script).resolve()
    return introduce(recipe, script.resolve().parent.name, f"{file}:{recipe.__name__}")


def introduce(recipe: type[Recipe], name: str, spec: str) -> type[Recipe]:
    """Tell a recipe class under which name it runs and how it is found again."""
    recipe.name = recipe.name or name
    recipe.spec = spec
    return recipe


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' where some known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
