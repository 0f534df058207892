"""One rank's run step by step, for comparison with that of another run: samples, rates, losses, state."""

from dataclasses import dataclass, field

from ..events import Backward, Batch, CheckpointSaved, LossValue, Step, StepStart
from ..model import Rank

Samples = tuple[object, ...]


@dataclass
class TrackedStep:
    """One optimizer step."""

    n: int
    samples: Samples = ()
    """Of its batches, in order: indices in the data set, or hashes. Empty: not known."""
    lr: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of its backward passes."""
    start: StepStart | None = None
    begins_pass: bool = False
    """Whether it has the first batch of an epoch."""


@dataclass
class Track:
    """A rank's steps of its main optimizer, the one with most, and how many of each there were at each checkpoint."""

    steps: list[TrackedStep]
    starts: dict[int, dict[int, StepStart]]
    """By optimizer and step."""
    saves: list[dict[int, int]]
    """For each checkpoint: by optimizer, the steps before it."""
    main: int = 0


def track(rank: Rank) -> Track:
    """Return what a rank did, step by step."""
    main = rank.steps[0].optimizer if rank.steps else 0
    found = Track([], {}, [], main)
    counts, passes = dict[int, int](), set[tuple[int, int]]()
    batches, current, backwards = list[Samples](), TrackedStep(1), 0
    for event in rank.events:
        if isinstance(event, Batch) and event.grad_enabled:
            current.begins_pass |= (event.loader, event.epoch) not in passes
            passes.add((event.loader, event.epoch))
            batches.append(tuple(event.index) or (event.hashes,))
        elif isinstance(event, LossValue):
            current.losses.append(event.value)
        elif isinstance(event, Backward):
            backwards += 1
        elif isinstance(event, StepStart):
            found.starts.setdefault(event.optimizer, {})[event.n] = event
            current.start = event if event.optimizer == main else current.start
        elif isinstance(event, CheckpointSaved):
            found.saves.append(dict(counts))
        elif isinstance(event, Step):
            counts[event.optimizer] = event.n
            if event.optimizer == main:
                # batches before them were loaded to be skipped
                current.samples = tuple(s for batch in batches[-max(1, backwards) :] for s in batch)
                current.lr = event.lr
                found.steps.append(current)
                batches, current, backwards = [], TrackedStep(event.n + 1), 0
    return found
