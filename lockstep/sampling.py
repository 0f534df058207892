"""Samples and scores made during training, by all ranks, from the plain and from the averaged weights.

    samples/step-00010000-<set>-<weights>.png ...    what the recipe's save_samples writes
    samples/step-00010000-score.json                 what its score returns

What a run made before it was killed is found by these names and not made again.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .evaluate import EvaluationFailed, Evaluator
from .files import write_text
from .optim import Ema
from .recipe import Generates, Scores

Show = Callable[[str], None]
Made = TypeVar("Made")


class Sampler:
    """Writes sample sets and scores into the folder of a run."""

    def __init__(self, evaluator: Evaluator, emas: list[Ema], run_folder: Path, show_status: Show, warn: Show):
        self.evaluator, self.emas, self.run_folder = evaluator, emas, run_folder
        self.folder, self.show_status, self.warn = run_folder / "samples", show_status, warn
        self.unfinished = self.folder / ".unfinished"
        self.failures = 0
        """Sample sets and scores that could not be made or written; none of them ends the run."""

    def sample(self, step: int) -> dict[str, list[Path]]:
        """Write every sample set of the recipe; return, on rank 0, the files by "<set>-<weights>"."""
        recipe = self.evaluator.recipe
        if not isinstance(recipe, Generates):
            return {}
        weights = ("ema", "plain") if self.emas else ("plain",)
        wanted = [(f"{name}-{kind}", kind, dict(s)) for name, s in recipe.sample_sets().items() for kind in weights]
        files: dict[str, list[Path]] = {}
        for number, (name, kind, settings) in enumerate(wanted, 1):
            title = f"step {step}: samples {name} ({number} of {len(wanted)})"
            with self.emas[0].applied() if kind == "ema" else nullcontext():
                files[name] = self._sample_set(title, f"step-{step:08d}-{name}", settings)
        return files

    def _sample_set(self, title: str, stem: str, settings: dict[str, Any]) -> list[Path]:
        world, recipe = self.evaluator.world, self.evaluator.recipe
        assert isinstance(recipe, Generates)
        if existing := world.broadcast(self._existing(stem) if world.is_main else None):
            return [path for path in existing if world.is_main]
        try:
            with self.evaluator.shown(title, self.show_status):
                count = settings.pop("n")
                samples = _despite_worker(lambda: self.evaluator.generate(count, settings))
        except EvaluationFailed as error:
            self._fail(f"{title} could not be generated: {error}")
            return []
        try:
            return [] if samples is None else _despite_worker(lambda: self._write(recipe, samples, stem))
        except Exception as error:  # on rank 0 alone, and nothing waits for it
            self._fail(f"{title} could not be written: {type(error).__name__}: {error}")
            return []

    def _existing(self, stem: str) -> list[Path]:
        """Return the files of a sample set; none if a killed run has not finished it."""
        return [] if any(self.unfinished.glob(f"{stem}.*")) else sorted(self.folder.glob(f"{stem}.*"))

    def _write(self, recipe: Generates, samples: Tensor, stem: str) -> list[Path]:
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        try:
            written = [Path(path) for path in recipe.save_samples(samples, self.unfinished / stem)]
            for path in [path for path in self.unfinished.rglob("*") if not path.is_dir()]:
                target = self.folder / path.relative_to(self.unfinished)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        finally:
            shutil.rmtree(self.unfinished, ignore_errors=True)  # also what a full disk has left of a file
        moved = [path for path in written if self.unfinished in path.parents]  # others stay where the recipe put them
        return [self.folder / path.relative_to(self.unfinished) if path in moved else path for path in written]

    def _fail(self, text: str) -> None:
        self.failures += 1
        self.warn(f"{text}; training goes on")

    def score(self, step: int) -> tuple[dict[str, float], str | None]:
        """Return the recipe's scores, from the averaged weights, and a note; empty if this run has them already."""
        world, recipe = self.evaluator.world, self.evaluator.recipe
        assert isinstance(recipe, Scores)
        if world.broadcast(world.is_main and self._score_file(step).is_file()):
            return {}, None
        model, averaged = self.evaluator.model, self.emas[0].applied() if self.emas else nullcontext()
        shown = self.evaluator.shown(f"step {step}: scoring samples", self.show_status)
        try:
            with shown, averaged, self.evaluator.eval_mode(), self.evaluator.autocast, torch.no_grad():
                values, note = recipe.score(model, self.evaluator.sum_over_ranks, self.run_folder)
        except EvaluationFailed as error:
            self._fail(f"step {step}: the score failed: {error}")
            return {}, None
        return values, note

    def record_score(self, step: int, values: dict[str, float]) -> None:
        """Note that a score was logged, so that it is not computed again."""
        if self.evaluator.world.is_main and values:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_text(self._score_file(step), json.dumps(values) + "\n")
            except OSError as error:
                self._fail(f"step {step}: the score could not be written: {error}")

    def _score_file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}-score.json"

    def discard_after(self, step: int) -> None:
        """Delete what a run has made after the checkpoint it resumes from: it will make it again."""
        with suppress(OSError):  # unless there is something in it
            self.unfinished.rmdir()
        for path in self.folder.glob("step-*"):
            number = path.name.removeprefix("step-")[:8]
            if number.isdigit() and int(number) > step and path.is_file():
                with suppress(OSError):
                    path.unlink()


def _despite_worker(act: Callable[[], Made]) -> Made:
    """Return what `act` returns; it is done again if the end of a loader's worker has interrupted it.

    Torch raises that error wherever the process is. On several ranks `act` raises it on all of them.
    """
    try:
        return act()
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        return act()
