"""How a run ends: what `fit` returns, and what it raises."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from .distributed import RunFailed


class Diverged(RunFailed):
    """The gradient was not finite in too many steps, in a row or of all."""


class NotSaved(RunFailed):
    """The run came to its end but its last state could not be written."""


class OutOfMemory(RunFailed):
    """A micro-batch of one sample does not fit into memory."""


REQUEUE = 75
"""Exit status of a run that a scheduler's signal stopped and that can go on: EX_TEMPFAIL of sysexits.h."""


class Stopped(SystemExit):
    """A signal has stopped a loop of one's own after a step, on all ranks; the script ends unless it is caught."""

    def __init__(self, by: signal.Signals):
        super().__init__(130 if by == signal.SIGINT else REQUEUE)
        self.by = by


@dataclass
class Outcome:
    """How a run ended."""

    step: int
    folder: Path
    model: nn.Module
    """The trained model, without wrappers, on the device it was trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    stopped_by: str | None = None
    """None at the planned end; `patience`, or the name of a signal."""
    files: tuple[Path, ...] = ()
    """The last samples."""
