"""The sample ledger of the page: which samples each rank was given in each pass, and which not exactly once."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model import JointPass, Trace
from ..verdict import counted

_BINS, _HEIGHT = 120, 16
_LEAST = 0.2
"""Height of what would be too low to be seen."""


@dataclass(frozen=True)
class Figure:
    """How often each rank was given each sample in one pass: of all there are, or of those given if that is not
    known."""

    title: str
    joint: JointPass
    times: NDArray[np.int64] | None  # by rank and sample; None: it is not known what a rank was given
    ends: tuple[str, str] = ("", "")  # names of the first and the last sample

    @property
    def loader(self) -> str:
        start = self.joint.first.start
        batches = f"batches of {start.batch_size}" if start.batch_size else ""
        sampler = "" if self.joint.is_stream else start.sampler
        return " · ".join(filter(None, [str(start.at or ""), start.type, sampler, batches]))

    @property
    def on_every_rank(self) -> bool:
        return self.times is not None and 1 < len(self.times) == self.joint.world and bool(self.times.all())

    @property
    def sentence(self) -> str:
        """What the picture shows."""
        if self.times is None:
            return "Which samples were given is not known."
        ranks = f"{'rank' if len(self.joint.passes) == 1 else 'ranks'} {', '.join(map(str, self.joint.passes))}"
        only = "" if self.joint.by_all else f"Only {ranks} made this pass. "
        return only + self._found(self.times) + self._extent(self.times.shape[1])

    def _found(self, times: NDArray[np.int64]) -> str:
        size, ranks = times.shape[1], (times > 0).sum(0)
        if self.on_every_rank:
            sliced = "; of each batch a rank gives the model its part only" if self.joint.sliced else ""
            return f"All {size} samples on every rank{sliced}."
        again = (times.sum(0) > 1) & (ranks == 1)
        kinds = {"on several ranks": ranks > 1, "more than once on one rank": again, "on none": ranks == 0}
        found = [(int(which.sum()), where) for where, which in kinds.items() if which.any()]
        if not found:
            return f"Each of {size} samples once."
        (first, where), *others = found
        phrases = [f"{counted(first, 'sample')} {where}", *(f"{n} {where}" for n, where in others)]
        return f"{', '.join(phrases)}, of {size}."

    def _extent(self, seen: int) -> str:
        """How much of the data set that was, where it was not all of it."""
        if self.joint.is_stream:
            return " They were read from a stream: what else it holds is not known."
        if self.joint.finished:
            return ""
        size = len(self.joint.indices) if self.joint.indices is not None else 0
        return f" The pass was not finished{f'; there are {size}' if size > seen else ''}."

    @property
    def rows(self) -> Iterator[tuple[str, dict[str, list[float]]]]:
        """What is drawn from top to bottom: a name, and for each kind of sample its share of each bin."""
        if self.times is None:
            return
        given = [_binned(times > 0) for times in self.times]
        most = max(cells.max() for cells in given)
        for rank, cells in zip(self.joint.passes, given, strict=True):
            yield f"rank {rank}", {"given": (cells / most).tolist()}
        if not self.on_every_rank or (self.joint.first.trains and not self.joint.sliced):
            total = self.times.sum(0)
            kinds = {"several": _binned(total > 1), "unseen": _binned(total == 0)}
            yield "not once", {kind: cells.tolist() for kind, cells in kinds.items() if cells.any()}


def ledger(trace: Trace) -> list[Figure]:
    """A figure for each pass that gave batches, as they began."""
    given = [{n: one for n, one in joint.passes.items() if one.rows or one.index} for joint in trace.joint_passes]
    joints = [JointPass(passes, trace.world) for passes in given if passes]
    titles: Counter[str] = Counter()
    figures = []
    for joint in sorted(joints, key=lambda joint: min(one.start.t for one in joint.passes.values())):
        name = "Training" if any(one.trains for one in joint.passes.values()) else "Evaluation"
        titles[name] += 1
        figures.append(_figure(f"{name}, pass {titles[name]}", joint))
    return figures


def _figure(title: str, joint: JointPass) -> Figure:
    parts = [np.asarray(part, np.uint64 if joint.is_stream else np.int64) for part in joint.samples.values()]
    if not all(map(len, parts)):
        return Figure(title, joint, None)
    given = np.concatenate(parts)
    whole, first, positions = np.unique(given, return_index=True, return_inverse=True)
    ends = "in the order they came", ""
    if joint.is_stream:
        positions = np.argsort(np.argsort(first))[positions]
    else:
        if joint.finished and joint.indices is not None and whole[-1] <= joint.indices[-1]:
            whole = np.union1d(whole, joint.indices)
        positions = np.searchsorted(whole, given)
        ends = f"sample {whole[0]}", str(whole[-1])
    by_rank = np.split(positions, np.cumsum([len(part) for part in parts])[:-1])
    return Figure(title, joint, np.stack([np.bincount(part, minlength=len(whole)) for part in by_rank]), ends)


def _binned(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The share of the samples of each bin that are chosen."""
    bins = min(len(chosen), _BINS)
    edges = -(-np.arange(bins + 1) * len(chosen) // bins)
    return np.add.reduceat(chosen.astype(np.float64), edges[:-1]) / np.diff(edges)


def outline(cells: list[float], hangs: bool) -> str:
    """The path around bars, one for each cell, that stand on the bottom of a row or hang from its top."""
    edge, direction = (0, 1) if hangs else (_HEIGHT, -1)
    heights = (direction * _HEIGHT * max(cell, _LEAST) if cell else 0.0 for cell in cells)
    tops = (f"V{edge + height:.4g}H{n}" for n, height in enumerate(heights, 1))
    return f"M0 {edge}{''.join(tops)}V{edge}z"
