"""What this rank does now: written by the main thread with plain assignments, read by the hang watch in another thread.

Nothing here takes a lock, sends a message or waits for a device, so that it may be called in every step.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

START_UP, FIRST_STEP, STEP, LOGGING = "start-up", "the first step", "step", "logging"
EVALUATION, SAMPLING, SAVING, CLOSING = "evaluation", "sampling", "saving", "closing"


@dataclass
class Activity:
    """The phase and the progress of this rank."""

    phase: str = START_UP
    """What the main thread does; changed by `enter` and `during` alone, which measure how long each phase takes."""
    step: int = 0
    """Steps done."""
    marks: int = 0
    """Rises with every sign of progress: a micro-batch, a step, a chunk of an evaluation."""
    loads_data: bool = False
    """Whether the main thread waits for the loader."""
    data_seconds: float = 0.0
    """Time spent so far in waiting for the loader."""
    wait_seconds: float = 0.0
    """Time spent so far in collectives within forward and backward."""
    device_steps: deque[torch.cuda.Event] = field(default_factory=deque)
    """Of each step since the last log, an event that occurs when the GPU has finished it."""
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase, up to the last change of the phase."""
    _entered: float = field(default_factory=lambda: time.perf_counter())

    def enter(self, phase: str) -> None:
        """Begin a phase; the time until now counts for the one before."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._entered
        self._entered, self.phase = now, phase

    def seconds(self) -> dict[str, float]:
        """Return the time spent in each phase so far, without the phases within it."""
        now = time.perf_counter() - self._entered
        return {**self._seconds, self.phase: self._seconds.get(self.phase, 0.0) + now}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark the block as a phase of its own."""
        before = self.phase
        self.enter(phase)
        self.marks += 1
        try:
            yield
        finally:
            self.enter(before)
            self.marks += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as time spent waiting for other ranks."""
        started = time.perf_counter()
        yield
        self.wait_seconds += time.perf_counter() - started

    def finish_step(self, step: int, on_gpu: bool) -> None:
        """Mark a step as done by the host; the GPU may still be at work on it."""
        self.step = step
        if self.phase != STEP:
            self.enter(STEP)
        self.marks += 1
        if on_gpu:
            self.device_steps.append(torch.cuda.current_stream().record_event())
