"""What a recipe provides: three methods, and capabilities that it may add.

A recipe is all the science of a model family in one class:

    class Mine(Recipe):
        def model(self): return MyNetwork()                 # plain single-device nn.Module
        def dataset(self, split): return MyData(split)      # None where there is no such split
        def loss(self, model, batch, rng):
            error = (model(batch["x"]) - batch["y"]).square()
            return Loss(total=error.sum(), weight=error.numel())

Whatever else it can do, it says by deriving from a capability: `class Mine(Recipe, Predicts, Describes)`. What the
engine calls, in order:

    model(), dataset("train"), dataset("val"), sample_costs()                   once
    optimizer(); Alternates: optimizers()                                       once
    load_pretrained(model)                     Pretrained: once, in a run that does not resume another
    every step, in the loader:                 Augments: augment() of each item; collate() of each micro-batch
    every step:                                Alternates: turn_of(), which optimizer's step it is; SeveralTerms:
                                               term_counts(); then loss(), backward; Schedules: lr_factor(); the
                                               update; AfterStep: after_step()
    every eval_every:                          Evaluates: evaluate_batch() on each batch of dataset("val"), summed over
                                               all ranks, metrics() of the sums; without it, the mean of loss()
    every sample_every:                        Generates: sample() on each rank's share of each of sample_sets();
                                               save_samples() on rank 0
    every score_every:                         Scores: score(), for metrics of generated samples
    lockstep test:                             Tests: test_batch(), metrics() on dataset("test"); save_test() on rank 0
    lockstep predict:                          Predicts: predict_dataset(path); predict_batch() on each batch;
                                               save_predictions() on rank 0, in order
    lockstep data:                             EmbedsData: write_data(folder), in the form that dataset() reads
    lockstep replay --samples:                 Pictures: picture_of() of the samples with the largest losses
    the receipt:                               Describes: describe_model(), describe_data()
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .config import Optim
from .loss import Loss, Sums, loss_means, loss_sums
from .rng import Rng

__all__ = ["Batch", "Loss", "Recipe", "Rng", "Split", "Sums", "loss_means", "loss_sums"]

Split = Literal["train", "val", "test"]
Batch = Any
"""What the items of a data set collate to: tensors in dicts, tuples or lists."""

SumOverRanks = Callable[[int, int, Callable[[range, Rng], Sums]], dict[str, Tensor]]
"""sum_over_ranks(count, batch_size, sums_of): `sums_of(numbers, rng)` for all of 0 … count-1, split over the ranks and
added up."""


@dataclass
class NoOptions:
    """A recipe without flags of its own."""


class Recipe(ABC):
    """The science of one model family. Subclass it, or see `lockstep/recipes`."""

    name: ClassVar[str] = ""
    """What runs of it are called; by default the name it is found under."""
    Options: ClassVar[type] = NoOptions
    """A dataclass: the flags of this recipe. Its values are in `self.options`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Engine settings that this recipe wants by default, by flag name."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of flags for `--preset NAME`."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names for flags, beside those that every recipe understands; dots for nested YAML keys (`ddp.enabled`)."""
    removed_options: ClassVar[frozenset[str]] = frozenset()
    """Options of older versions, which the `config.yaml` of an old run may hold; they are ignored."""

    def __init__(self, options: Any = None):
        self.options: Any = self.Options() if options is None else options
        self.step = torch.zeros((), dtype=torch.int64)
        """In `loss`: the number of the step, from 0. A tensor on the device, so that a compiled loss stays compiled."""
        self.n_steps = 0
        """How long the run is."""
        self.optim = Optim()
        """The flags of the optimizer (--lr, --weight_decay, ...), for an `optimizer` of your own."""

    def __init_subclass__(cls) -> None:
        """Refuse a method of a capability that the class does not derive from: it would never be called."""
        super().__init_subclass__()
        for capability in CAPABILITIES:
            for method in capability.__dict__:
                if not method.startswith("_") and hasattr(cls, method) and not issubclass(cls, capability):
                    raise TypeError(
                        f"{cls.__name__} defines {method}() but does not derive from {capability.__name__}, so nothing "
                        f"would call it: write class {cls.__name__}(Recipe, {capability.__name__})"
                    )

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network, on the CPU, freshly initialised. The global generator is seeded before the call."""

    @abstractmethod
    def dataset(self, split: Split) -> Any | None:
        """Return a data set; None for no such split.

        Map-style (`__len__`, and `__getitem__` or `__getitems__`), shuffled by the engine. "train" may be iterable
        instead: it is read in its own order, the same on all ranks; where it has `set_epoch(n)`, that is called.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, rng: Rng) -> Loss:
        """Return the loss of one micro-batch. All randomness comes from `rng`."""

    def collate(self, items: list[Any]) -> Batch:
        """Return a batch of `items`; override it where they differ in size."""
        return default_collate(items)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return an optimizer of your own, or None for the one that the flags describe. `self.optim` has the flags."""
        return None

    def sample_costs(self, dataset: Any) -> Sequence[float] | None:
        """Return how long each training sample takes, for ranks to share a global batch evenly by it; None: alike."""
        return None

    def smoke(self) -> None:
        """Make everything that costs time small: LOCKSTEP_SMOKE only shows that all parts work."""


class Augments(ABC):
    """Changes training items at random, in the loader's processes."""

    @abstractmethod
    def augment(self, item: Any, rng: Rng) -> Any:
        """Return the changed item; `rng` has one key."""


class SeveralTerms(ABC):
    """Its loss is `Loss.of_terms(...)`: a sum of terms, each a mean over elements of its own."""

    @abstractmethod
    def term_counts(self, batch: Batch, rng: Rng) -> dict[str, Tensor]:
        """Return how many elements this micro-batch has of each term; `rng` as in `loss`.

        The counts must follow from the batch and the randomness alone: the engine adds them up over the global batch
        before the first forward pass.
        """


class Alternates(ABC):
    """Has several optimizers that take turns, one in each step: GANs, actor and critic, alternating minimisation.

        for step in range(n_steps):
            self.turn = self.turn_of(step)                      # a name in optimizers()
            for batch in micro_batches(step // steps_per_batch):
                self.loss(model, batch, rng).backward()         # gradients of the parameters of this optimizer only
            clip, lr_factor(step), optimizers[self.turn].step(), after_step(model), averages

    What is logged has the name of the turn in front: d_loss, g_loss. The scale of fp16 is one for all turns.
    """

    steps_per_batch: int = 1
    """Steps in a row that use the same global batch, with the same randomness; it is read again for each."""
    turn: str = ""
    """In `loss`: the name of the optimizer whose step it is."""

    @abstractmethod
    def optimizers(self, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by name. `self.optim` has the flags."""

    @abstractmethod
    def turn_of(self, step: int) -> str:
        """Return the name of the optimizer that makes this step, counted from 0. It follows from the step alone."""


class AfterStep(ABC):
    """Changes the model after each update, beside the optimizer: teachers that are averages, target networks."""

    @abstractmethod
    def after_step(self, model: nn.Module) -> None:
        """Change parameters without a gradient, or buffers, in place. On every rank alike; nothing is recorded.

        `self.step` is the number of the step that was made. They are saved as parts of the model.
        """


class Schedules(ABC):
    """Has a schedule of its own for the learning rate, in place of --schedule and its warm-up."""

    @abstractmethod
    def lr_factor(self, step: int) -> float:
        """Return what --lr is multiplied by in a step, counted from 0; `self.n_steps` is the length of the run."""


class Pretrained(ABC):
    """Can start from weights that exist."""

    @abstractmethod
    def load_pretrained(self, model: nn.Module) -> str | None:
        """Load what a new run starts from into the model; return a note for the receipt."""


class Evaluates(ABC):
    """Has metrics of its own; without this, the metric is the mean of the loss."""

    @abstractmethod
    def evaluate_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        """Return what to add up over the set: sums and counts of any shape. Integers add up exactly."""

    @abstractmethod
    def metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return named values, from the sums over the whole set."""

    def same_as_training(self) -> Collection[str]:
        """Return the metrics that are the same quantity as what `loss` logs under that name.

        Curves draw these, and no others, together with those of training.
        """
        return ()


class Tests(Evaluates):
    """Does more for `lockstep test` than for an evaluation during training."""

    def test_batch(self, model: nn.Module, batch: Batch, rng: Rng) -> Sums:
        """Return what `lockstep test` adds up; by default as in an evaluation."""
        return self.evaluate_batch(model, batch, rng)

    @abstractmethod
    def save_test(self, sums: dict[str, Tensor], values: dict[str, float], folder: Path) -> list[Path]:
        """Write tables and plots of a test; return the files."""


class Predicts(ABC):
    """Predicts for a user's own files: `lockstep predict`."""

    @abstractmethod
    def predict_dataset(self, path: Path) -> Any:
        """Return a map-style data set of the file or folder to predict, in sorted order."""

    @abstractmethod
    def predict_batch(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Return one prediction for each sample of the batch: tensors, numbers, or a dict of them."""

    @abstractmethod
    def save_predictions(self, predictions: list[Any], dataset: Any, folder: Path) -> list[Path]:
        """Write the predictions for `predict_dataset`, in its order; return the files, the most useful one first."""

    def describe_predictions(self, predictions: list[Any], dataset: Any) -> str:
        """Return a line that sums them up."""
        return f"{len(predictions)} predictions"


class Generates(ABC):
    """Generates samples: during training, and by `lockstep sample`."""

    @abstractmethod
    def sample_sets(self) -> dict[str, dict[str, Any]]:
        """Return what to generate during training: name -> the keyword arguments of `sample`, and `n`, how many."""

    @abstractmethod
    def sample(self, model: nn.Module, index: Tensor, rng: Rng, **settings: Any) -> Tensor:
        """Return the samples numbered `index` (n,), one row each. `rng` is keyed by these numbers."""

    @abstractmethod
    def save_samples(self, samples: Tensor, path: Path) -> list[Path]:
        """Write generated samples to `path` plus a suffix; return the files, of any kind, the most useful one first.

        Pictures (.png, .gif, .jpg) and text (.txt, .md, .csv, .json) are shown in TensorBoard and W&B.
        """


class Scores(ABC):
    """Has metrics that need generated samples, such as FID."""

    @property
    @abstractmethod
    def score_every(self) -> int:
        """Steps between two calls of `score`; a run at least that long ends with one. 0: never."""

    @abstractmethod
    def score(
        self, model: nn.Module, sum_over_ranks: SumOverRanks, folder: Path
    ) -> tuple[dict[str, float], str | None]:
        """Return values, and a note (what is missing, for example). `folder` is for files to keep."""


class EmbedsData(ABC):
    """Brings data of its own to train on at once."""

    @abstractmethod
    def write_data(self, folder: Path) -> str:
        """Write the embedded data as files that `dataset` reads; return a line that says what was written."""


class Pictures(ABC):
    """Has training samples to look at."""

    @abstractmethod
    def picture_of(self, item: Any) -> tuple[Tensor, str]:
        """Return an item of the training set, after `augment`, as an image (3, H, W) uint8, and its label in words."""


class Describes(ABC):
    """Says more in the receipt than the type of the model and the number of samples."""

    @abstractmethod
    def describe_model(self, model: nn.Module) -> str:
        """Return a few words: what is trained."""

    @abstractmethod
    def describe_data(self, split: Split) -> str:
        """Return a few words: where the data come from."""


CAPABILITIES = (
    Augments,
    SeveralTerms,
    Alternates,
    AfterStep,
    Schedules,
    Pretrained,
    Evaluates,
    Tests,
    Predicts,
    Generates,
    Scores,
    EmbedsData,
    Pictures,
    Describes,
)
"""What a recipe may derive from beside `Recipe`."""
