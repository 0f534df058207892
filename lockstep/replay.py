"""Steps of a run, done again: from the nearest checkpoint before them, on any number of ranks.

    replay = Replay(run, until=12, world=world, scratch=folder)
    replay.advance(11)                    up to the weights after step 11
    sample_losses(replay.trainer)         of each sample of step 12
    replay.advance(12)                    replay.redone[12] has its loss and, of an exact run, its digests

Nothing is written to the run's folder.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from . import checkpoint, flags
from .batching import Batching, MicroBatch
from .distributed import World
from .flags import Request
from .loader import Fetch, to_device
from .parting import differing_settings
from .recipe import Pictures, Recipe
from .rng import Rng
from .rundir import RunDir, first_launch, launch_of, read_receipt
from .trainer import Trainer
from .watch.history import Digested, read_history


@dataclass(frozen=True)
class Run:
    """A run to replay: its folder, the settings of one of its launches, and what it left behind."""

    folder: Path
    step: int
    """The settings are those that this step was made with."""
    request: Request
    receipt: dict[str, Any]
    history: dict[int, dict[str, Any]]
    """By step, the lines of its history."""
    problem: str | None
    """What is wrong with the file of its history."""
    states: dict[int, dict[str, Any]]
    """By step, the numbers of its checkpoints."""

    @classmethod
    def open(cls, folder: Path, recipe: type[Recipe], step: int, device: str | None = None) -> "Run":
        """Return the run with the settings of the launch that made `step`."""
        receipt = read_receipt(folder)
        settings = _settings(folder, receipt, step) | {"history_every": 1, "shard": "none"}
        settings |= {"device": device} if device else {}
        known = {name: value for name, value in settings.items() if name not in recipe.removed_options}
        request = flags.request_for(recipe, None, known)
        states = checkpoint.states(folder / "checkpoints")
        return cls(folder, step, request, receipt, *read_history(folder), states)

    @property
    def exact(self) -> bool:
        return self.request.train.hardware.exact

    def recorded(self, step: int) -> dict[str, Any]:
        """Return what the run has recorded of a step: a line of the history, or the weights of a checkpoint."""
        saved = self.states.get(step, {}).get("history") or {}
        weights = {"weights": saved["weights"]} if saved.get("weights") else {}
        return {**weights, **self.history.get(step, {})}

    def next_recorded(self, step: int) -> int | None:
        """Return the first step from `step` on of which the run has recorded a digest."""
        return min((s for s in {*self.history, *self.states} if s >= step and self.recorded(s)), default=None)

    def launches(self, first: int, last: int) -> list[int]:
        """Return the first step, and that of each launch that began later, of the steps from `first` to `last`."""
        return [first, *(n for launch in self.receipt.get("launches", []) if first < (n := launch["step"] + 1) <= last)]

    def other_settings(self, first: int, last: int) -> list[str]:
        """Return a note for each launch of the steps from `first` to `last` that had other settings than these."""
        notes, now = [], _settings(self.folder, self.receipt, self.step)
        for step in self.launches(first, last):
            if names := ", ".join(differing_settings(_settings(self.folder, self.receipt, step), now)[0]):
                notes.append(f"the run had other settings ({names}) at step {step}; those of step {self.step} are used")
        return notes

    def start(self, step: int, notes: list[str]) -> Path | None:
        """Return the newest intact checkpoint before `step`; None if the run is to be replayed from its beginning."""
        saved = checkpoint.newest(self.folder / "checkpoints", notes.append, up_to=step - 1)
        if saved is not None:
            return saved.path
        there = ", ".join(map(str, sorted(self.states))) or "none"
        source = first_launch(self.receipt).get("resumed_from")
        if source is None or self.folder.resolve() in Path(source).parents:  # its own: of an earlier version's run
            if step > 1:
                notes.append(f"no checkpoint before step {step} (there are: {there}; --keep leaves more)")
            return None
        began = first_launch(self.receipt)["step"]
        if began < step and checkpoint.is_checkpoint(Path(source)):
            return Path(source)  # of the run that this one branched off from
        raise ValueError(
            f"{self.folder} has no checkpoint before step {step} (there are: {there}), and {source}, where it branched "
            f"off after step {began}, does not help"
        )


def _settings(folder: Path, receipt: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the settings of the launch that made `step`; those of the last one if a receipt has no others."""
    found = launch_of(receipt, step).get("settings") or receipt.get("settings")
    return dict(found or flags.read_yaml(folder / "config.yaml"))


@dataclass(frozen=True)
class Redone:
    """A step that was done again."""

    loss: float
    lr: float
    gradient_norm: float
    digested: Digested | None
    """On rank 0, of an exact run."""


class Replay:
    """A run's trainer at some checkpoint, and the steps that it has done since."""

    def __init__(self, run: Run, before: int, world: World, scratch: Path):
        notes: list[str] = []
        start, notes = world.on_main(lambda: (run.start(before, notes), notes))
        receipt, first = run.receipt, run.history.get(0, {})
        run_dir = RunDir(
            scratch, start, receipt.get("global_batch"), first.get("tiles") or receipt.get("tiles"), list(notes)
        )
        self.run, self.trainer = run, Trainer(run.request, world, run_dir)
        self.start, self.notes = start, notes
        self.first = self.trainer.progress.step + 1
        """The first step that is done again."""
        if self.trainer.state.exactness is not None:
            self.notes += self.trainer.state.exactness.breaks
        self.redone: dict[int, Redone] = {}
        self.trainer.model.train()

    def advance(self, step: int) -> None:
        """Do all steps up to `step` again."""
        trainer = self.trainer
        while trainer.progress.step < step:
            trainer.redo_step()
            digested = trainer.state.history.write() if trainer.state.history else []
            values, update = trainer.step.loss_sums.means(trainer.world), trainer.update
            loss, norm = next(iter(values.values())), float(update.norms[update.name])
            self.redone[trainer.progress.step] = Redone(loss, update.lr, norm, digested[0] if digested else None)

    def differences(self, step: int) -> list[str] | None:
        """Return, on rank 0, which recorded values of a step are others now; None if there is nothing to compare."""
        redone, recorded = self.redone[step].digested, self.run.recorded(step)
        if redone is None or not recorded:
            return None
        names = ("tiles", "lr", "loss", "skipped_steps", "gradient", "weights")
        return [name for name in names if name in recorded and recorded[name] != redone.line[name]]


@dataclass(frozen=True)
class SampleLoss:
    """A sample by itself: its loss is a mean over its own elements."""

    index: int
    epoch: int
    loss: float
    gradient_norm: float
    share: float
    """Of the sum of all samples' losses that the step's loss is made from."""


def sample_losses(trainer: Trainer) -> list[SampleLoss]:
    """Return, on rank 0, the samples of the next step with their losses at these weights, the largest first.

    Each goes through the model alone, with its own randomness, without dropout; BatchNorm uses its running statistics.
    """
    world, model = trainer.world, trainer.model
    trainer.step.start_turn(trainer.progress.step)
    single = dataclasses.replace(trainer.setup.batching, tiles=trainer.setup.batching.global_batch, micro_batch=1)
    normalizer = dataclasses.replace(trainer.setup, batching=single).normalizer()
    micro_batches, per_sample = normalizer.count_terms(_singles(trainer, single))
    frozen = [m for m in model.modules() if isinstance(m, _BatchNorm | _DropoutNd)]
    for module in frozen:
        module.eval()
    rows = [_loss_alone(trainer, micro, per_sample) for micro in micro_batches]
    for module in frozen:
        module.train()
    everyone = [row for rank in world.gather(rows) for row in rank]
    whole = math.fsum(total for *_, total in everyone if math.isfinite(total))
    found = [
        SampleLoss(index, epoch, loss, norm, total / whole if whole else math.nan)
        for index, epoch, loss, norm, total in everyone
    ]
    return sorted(found, key=lambda one: (math.isfinite(one.loss), -one.loss, one.epoch, one.index))


def _singles(trainer: Trainer, single: Batching) -> Iterator[MicroBatch]:
    """Yield this rank's samples of the next step, one at a time."""
    if trainer.step.stream is None:
        raise ValueError("--samples reads single samples, and the data set of this run is iterable; index it instead")
    fetch, own = Fetch.of(trainer.recipe, trainer.setup.data, trainer.config.data.seed), single.own(trainer.world.rank)
    samples = trainer.step.stream.tiles(trainer.progress.step, own, single.global_batch)
    for number, sample in zip(own, samples, strict=True):
        (micro,) = fetch.__getitems__((sample, number, True))
        if micro.error:
            raise ValueError(micro.error)
        yield to_device(micro, trainer.world.device, trainer.precision.dtype)


def _loss_alone(
    trainer: Trainer, micro: MicroBatch, per_sample: dict[str, Tensor] | None
) -> tuple[int, int, float, float, float]:
    """Return index, epoch, loss, gradient norm, and the sum that the loss is a mean of."""
    objective, scaler = trainer.step.replica.objective, trainer.precision.scaler
    with trainer.precision.autocast:
        # `forward` itself, not the module: neither DDP nor a compiled graph of another shape is wanted here.
        total, weight, _ = objective.forward(micro.batch, micro.epochs, micro.indices, per_sample)
    # In fp16 the gradient of a sum over a sample is larger by far than its share of the step's, for which the scale is.
    scale = float(scaler.scale) / (float(weight) or 1.0) / trainer.setup.batching.global_batch if scaler else 1.0
    norm = _gradient_norm(total.float() * scale, trainer.model) / scale
    count, summed = float(weight), float(total.detach())
    names = int(micro.indices[0]), int(micro.epochs[0])
    return *names, summed / count if count else 0.0, norm / count if count else 0.0, summed


def _gradient_norm(total: Tensor, model: nn.Module) -> float:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = [g for g in torch.autograd.grad(total, parameters, allow_unused=True) if g is not None]
    return float(torch.nn.utils.get_total_norm(found))


def pictures(trainer: Trainer, samples: list[SampleLoss]) -> list[tuple[Tensor, str]]:
    """Return each sample as an image, with its label; nothing for a recipe without pictures."""
    recipe, seed = trainer.recipe, trainer.config.data.seed
    if not isinstance(recipe, Pictures):
        return []
    fetch, shown = Fetch.of(recipe, trainer.setup.data, seed), []
    for sample in samples:
        (item,) = fetch.items([sample.index])
        if fetch.preparation.augment is not None:
            item = fetch.preparation.augment(
                item, Rng.of(seed, torch.tensor([sample.epoch]), torch.tensor([sample.index]))
            )
        shown.append(recipe.picture_of(item))
    return shown
