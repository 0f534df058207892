"""Steps that were skipped because the gradient was not finite: which samples are to blame, and when it is too many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import Optim
from .evaluate import EvaluationFailed, Evaluator
from .optim import Update
from .outcome import Diverged
from .stream import Slice

SamplesOf = Callable[[int], Slice | None]
FP16_OVERFLOWS = 20
"""Skipped steps that do not count as bad in fp16: its scale starts too high and is halved by each of them."""


class BadSteps:
    """What is said of skipped steps, and when they fail the run; asked whenever values are logged or saved."""

    def __init__(self, update: Update, limits: Optim, evaluator: Evaluator, data: Any, folder: Path):
        self.update, self.limits, self.evaluator, self.data, self.folder = update, limits, evaluator, data, folder
        self._searched = False

    def check(self, step: int, n_steps: int, samples_of: SamplesOf, say: Callable[[str], None]) -> None:
        """Say which step was skipped, and once which of its samples are to blame; raise Diverged if there are too many.

        Every rank calls this. `samples_of(step)`: this rank's samples of a step; None where they cannot be read again.
        """
        first = int(self.update.first_bad)
        if first < 0:
            return
        skipped, in_row = int(self.update.bad_steps), int(self.update.most_bad_in_row)
        self.update.first_bad.fill_(-1)
        self.update.most_bad_in_row.zero_()
        text = f"the gradient was not finite at step {first + 1}: {skipped} of {step} steps skipped so far"
        if not self._searched:
            self._searched = True
            text += f"; samples with a loss that is not finite by themselves: {self._to_blame(samples_of(first))}"
        say(text)
        advice = f"lower --lr, set --clip_grad, or look at the data. The weights are those of before: {self.folder}"
        if in_row >= self.limits.max_bad_steps:
            raise Diverged(f"the gradient was not finite in {in_row} steps in a row (up to step {step}); {advice}")
        counted = skipped - (FP16_OVERFLOWS if self.update.scaler else 0)
        too_many = counted >= 5 and counted > self.limits.max_bad_share * step
        if too_many or skipped == step == n_steps:
            raise Diverged(
                f"the gradient was not finite in {skipped} of {step} steps, more than --max_bad_share "
                f"{self.limits.max_bad_share:g} allows; {advice}"
            )

    def _to_blame(self, samples: Slice | None) -> str:
        if samples is None:
            return "not searched, as the data set is iterable"
        try:
            found = self.evaluator.nonfinite_samples(self.data, samples)
        except EvaluationFailed as error:
            return f"could not be searched ({error})"
        return ", ".join(map(str, found[:8])) + ", ..." * (len(found) > 8) or "none"
