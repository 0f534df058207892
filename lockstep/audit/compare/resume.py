"""lockstep audit --resume: a run is killed after a checkpoint and resumed; what the resumed run has lost is named.

The first run goes on for some steps after the checkpoint before it is killed. The resumed run takes the same steps once
more. So both are compared in one history, and the script need not be seeded.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from .. import events
from ..catalog import Finding, finding
from ..judges import judge
from ..launcher import run_ranks
from ..model import Rank, Trace
from ..source import Site
from ..worker import LaunchSpec
from .flags import resume_words
from .mirror import Mirror
from .track import Track, track

_NAMES = 3
"""Tensors that are named."""


def resume(
    spec: LaunchSpec, given: str | None, patience: float, limit: float
) -> tuple[Trace, list[Finding], list[str]]:
    """Return the resumed run, what it has lost, and notes on what was compared."""
    with tempfile.TemporaryDirectory(prefix="lockstep-resume-", ignore_cleanup_errors=True) as folder:
        mirror = Mirror(Path.cwd(), Path(folder) / Path.cwd().name)
        spec = replace(spec, folder=mirror.target, in_detail=True)
        first = run_ranks(replace(spec, stop_at_save=spec.steps // 2), patience, limit)
        if _broken(first):
            return mirror.restore_lines(first), judge(first), ["the run that was to be resumed failed"]
        saved, steps = _saving_rank(first), min(len(rank.steps) for rank in first.ranks)
        if saved is None:
            problem = f"the script saved no checkpoint with a step after it in its first {steps} steps"
            raise ValueError(
                f"{problem}: give --steps twice as many as one checkpoint needs, or let it save more often"
            )
        words, how = resume_words(spec.argv, given, _written(saved, mirror.target), mirror.target)
        after = steps - max(_saves(track(saved))[-1].values())
        second = run_ranks(replace(spec, argv=words, steps=after), patience, limit)
        lines = [mirror.restore_lines(trace) for trace in (first, second)]
    found, notes = compare(*lines)
    return second, found, [f"resumed by `{' '.join(words)}` ({how}), in a copy of the current folder", *notes]


def compare(first: Trace, second: Trace) -> tuple[list[Finding], list[str]]:
    """Return what the second run lost of the first, and notes on what was compared."""
    if _broken(second):
        return judge(second), ["the resumed run failed"]
    saved = _saving_rank(first)
    pairs = [(track(a), track(b)) for a, b in zip(first.ranks, second.ranks, strict=True)]
    at = _resume_line(second)
    if saved is None or not all(resumed.steps for _, resumed in pairs):
        return [finding("not-resumed", "the resumed run takes no step", at)], []
    found: dict[str, Finding] = {}
    saves = _saves(track(saved))
    chosen = _chosen(saves, *pairs[0])
    for rank, (before, after) in enumerate(pairs):
        for one in _Comparison(before, after, chosen or saves[-1], chosen is not None, rank, at).findings():
            found.setdefault(one.kind.name, one)
    before, after = pairs[0]
    main = (chosen or saves[-1]).get(before.main, 0)
    last = min(len(before.steps), main + len(after.steps))
    note = f"the checkpoint after step {main}; steps {main + 1} to {last} were compared"
    if not found and _weights(before, last) == _weights(after, last - main) is not None:
        note += f": the weights before step {last} are the same to the bit"
    elif not found:
        part = f"from step {_parting(before, after, main, last)} on the weights differ from the uninterrupted run"
        found["resume-drift"] = finding("resume-drift", part, at)
    return list(found.values()), [note]


class _Comparison:
    """The steps of one rank after a checkpoint, before and after the interruption."""

    def __init__(self, before: Track, after: Track, save: dict[int, int], restored: bool, rank: int, at: Site | None):
        self.before, self.after, self.save, self.restored = before, after, save, restored
        self.rank, self.at, self.done = rank, at, save.get(before.main, 0)
        self.pairs = list(zip(before.steps[self.done :], after.steps, strict=False))

    def findings(self) -> Iterator[Finding]:
        lost = [*self._optimizer(), *self._schedule(), *self._samples(), *self._randomness()]
        if self.restored:
            yield from lost
            return
        fresh = _weights(self.after, 1) == _weights(self.before, 1)
        what = "the resumed run begins with the weights of step 1" if fresh else "the weights are not the saved ones"
        also = [f"lost too: {', '.join(one.kind.name.removeprefix('resume-') for one in lost)}"] if lost else []
        yield finding("resume-weights", what, self.at, f"rank {self.rank}, checkpoint after step {self.done}", *also)

    def _optimizer(self) -> Iterator[Finding]:
        for number, steps in self.save.items():
            old = self.before.starts.get(number, {}).get(steps + 1)
            new = self.after.starts.get(number, {}).get(1)
            if old is None or new is None or old.moments == new.moments:
                continue
            if not new.moments:
                kinds = sorted({name.split(" of ")[0] for name in old.moments})
                seen = (
                    f"there was {', '.join(kinds)} for {len({n.split(' of ', 1)[1] for n in old.moments})} parameters"
                )
                yield finding("resume-optimizer", "the optimizer begins without its state", self.at, seen)
            else:
                names = [n for n, value in old.moments.items() if new.moments.get(n) != value]
                more = " …" if len(names) > _NAMES else ""
                seen = f"{len(names)} of {len(old.moments)} tensors: {', '.join(names[:_NAMES])}{more}"
                yield finding("resume-optimizer", "the optimizer's state is not the saved one", self.at, seen)
            return

    def _schedule(self) -> Iterator[Finding]:
        for old, new in self.pairs:
            if old.lr != new.lr:
                fresh = self.before.steps[new.n - 1].lr == new.lr
                what = "the learning rate starts over" if fresh else "the learning rate is another one"
                seen = f"step {old.n}: {_rates(old.lr)} before, {_rates(new.lr)} after the resume"
                yield finding("resume-schedule", what, self.at, seen)
                return

    def _samples(self) -> Iterator[Finding]:
        for old, new in self.pairs:
            if old.samples == new.samples or not old.samples or not new.samples:
                continue
            same = next((s.n for s in self.before.steps if s.samples == new.samples), None)
            seen = f"step {old.n}, rank {self.rank}: {_some(old.samples)} before, {_some(new.samples)} after the resume"
            if same is not None and same <= self.done:
                what = f"the data starts over: step {old.n} has the samples of step {same}"
                yield finding("resume-samples", what, self.at, seen)
            elif new is self.pairs[0][1] and old.begins_pass:
                what = "the next epoch has another order than in the uninterrupted run"
                yield finding("resume-samples", what, self.at, seen, severity="note")
            else:
                what = "the position in the data is lost: samples of this epoch come again, others never"
                yield finding("resume-samples", what, self.at, seen)
            return

    def _randomness(self) -> Iterator[Finding]:
        old, new = self.pairs[0][0].start, self.pairs[0][1].start
        if old is None or new is None:
            return
        states = [step.start.generators for step in self.before.steps[self.done :] if step.start]
        first = self.before.steps[0].start
        lost, over = list[str](), list[str]()
        for name, state in old.generators.items():
            changes = [a[name] != b[name] for a, b in pairwise(states) if name in a and name in b]
            if state == new.generators.get(name) or sum(changes) <= len(changes) / 2:
                continue  # the same, or not drawn from while training
            (over if first and first.generators.get(name) == new.generators.get(name) else lost).append(name)
        if over:
            what = f"random numbers start over ({', '.join(over)}): step {self.done + 1} draws those of step 1"
            yield finding("resume-randomness", what, self.at, severity="warning")
        elif lost:
            yield finding(
                "resume-randomness", f"the state of the generators is not restored ({', '.join(lost)})", self.at
            )


def _broken(trace: Trace) -> bool:
    return trace.hung or any(rank.failed for rank in trace.ranks)


def _saving_rank(trace: Trace) -> Rank | None:
    """The first rank that saved a checkpoint and then took a step."""
    return next((rank for rank in trace.ranks if _saves(track(rank))), None)


def _saves(run: Track) -> list[dict[int, int]]:
    """The checkpoints that a step follows: by optimizer, the steps before it."""
    return [save for save in run.saves if save and max(save.values()) < len(run.steps)]


def _written(rank: Rank, folder: Path) -> Path | None:
    """The file that was written last; that of another name in its folder, if it was moved there."""
    paths = [Path(save.path) for save in rank.of(events.Save) if save.keys]
    if not paths:
        return None
    if paths[-1].exists():
        return paths[-1]
    beside = [p for p in paths[-1].parent.glob("*") if p.is_file() and p.suffix in (".pt", ".pth", ".ckpt", ".bin")]
    return max(beside, key=lambda p: p.stat().st_mtime, default=None)


def _resume_line(trace: Trace) -> Site | None:
    """Where the resumed run loads its checkpoint; else its first step."""
    rank = trace.ranks[0]
    return rank.line(events.Load) or rank.line(events.LoadStateDict) or rank.line(events.Step)


def _chosen(saves: list[dict[int, int]], before: Track, after: Track) -> dict[int, int] | None:
    """The checkpoint whose weights the resumed run begins with, the last one first."""
    mine = _weights(after, 1)
    return next((s for s in reversed(saves) if mine and _weights(before, s.get(before.main, 0) + 1) == mine), None)


def _weights(run: Track, n: int) -> dict[str, int] | None:
    start = run.starts.get(run.main, {}).get(n)
    return start.weights if start else None


def _parting(before: Track, after: Track, done: int, last: int) -> int:
    steps = range(done + 1, last + 1)
    return next((n for n in steps if _weights(before, n) != _weights(after, n - done)), last)


def _rates(lr: list[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(lr))


def _some(samples: tuple[object, ...]) -> str:
    known = [str(s) for s in samples[:4] if isinstance(s, int)]
    return f"{', '.join(known)} …" if known else "other samples"
