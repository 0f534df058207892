"""The sample ledger of the page: which samples each rank was given in each pass, and which not exactly once."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model import JointPass, Trace
from ..verdict import counted
from .parts import box, legend, section

_BINS, _ROW, _GAP = 120, 20, 4
_PICTURES = 8
"""Further passes have a sentence only."""
_LEAST = 0.2
"""Height of what would be too low to be seen."""
Bins = NDArray[np.float64]


Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """The samples of a pass by rank, as positions among all there are, or among those given if that is not known."""

    positions: dict[int, NDArray[Any]]
    size: int
    ends: tuple[str, str]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples on several ranks, several times on one, on none."""
        distinct = [np.unique(p) for p in self.positions.values()]
        seen, ranks = np.unique(np.concatenate(distinct), return_counts=True)
        _, times = np.unique(np.concatenate(list(self.positions.values())), return_counts=True)
        return int((ranks > 1).sum()), int(((times > 1) & (ranks == 1)).sum()), self.size - len(seen)

    def on_every_rank(self, world: int) -> bool:
        parts = self.positions.values()
        return 1 < len(parts) == world and all(len(np.unique(p)) == self.size for p in parts)


def ledger(trace: Trace) -> str:
    """The section."""
    passes = _passes(trace)
    if not passes:
        text = "No sample came from a DataLoader, so the ledger is empty."
        return section("samples", "Samples", f'<p class="muted">{text}</p>')
    figures = "".join(_figure(title, joint) for title, joint in passes[:_PICTURES])
    pictures = f'<div class="passes">{figures}</div>'
    return section("samples", "Samples", _legend(), pictures, _further(passes[_PICTURES:]))


def _passes(trace: Trace) -> list[tuple[str, JointPass]]:
    """The passes that gave batches, as they began, each with a title."""
    given = [{n: one for n, one in joint.passes.items() if one.rows or one.index} for joint in trace.joint_passes]
    joints = [JointPass(passes, trace.world) for passes in given if passes]
    titles: Counter[str] = Counter()
    titled = []
    for joint in sorted(joints, key=lambda joint: min(one.start.t for one in joint.passes.values())):
        name = "Training" if any(one.trains for one in joint.passes.values()) else "Evaluation"
        titles[name] += 1
        titled.append((f"{name}, pass {titles[name]}", joint))
    return titled


def _share(joint: JointPass) -> Share | None:
    """None if it is not known which samples a rank was given."""
    samples = {n: np.asarray(part, np.uint64 if joint.is_stream else np.int64) for n, part in joint.samples.items()}
    if not all(len(part) for part in samples.values()):
        return None
    if joint.is_stream:
        given, first, inverse = np.unique(
            np.concatenate(list(samples.values())), return_index=True, return_inverse=True
        )
        arrival = np.argsort(np.argsort(first))[inverse]
        parts = np.split(arrival, np.cumsum([len(part) for part in samples.values()])[:-1])
        return Share(dict(zip(samples, parts, strict=True)), len(given), ("in the order they came", ""))
    whole = _whole(joint) if joint.finished else _distinct(samples.values())
    if not isinstance(whole, range):
        samples = {n: np.searchsorted(whole, part) for n, part in samples.items()}
    return Share(samples, len(whole), (f"sample {whole[0]}", str(whole[-1])))


def _distinct(parts: Iterable[Any]) -> Positions:
    return np.unique(np.concatenate([np.asarray(part, np.int64) for part in parts]))


def _whole(joint: JointPass) -> range | Positions:
    """The indices that there are, or if that is not known, those given."""
    seen = _distinct(joint.samples.values())
    subsets = [one.start.subset for one in joint.passes.values() if one.start.subset]
    if subsets:
        return np.union1d(seen, _distinct(subsets))
    size = joint.first.start.size
    return range(size) if size is not None and seen[-1] < size else seen


# -- words ------------------------------------------------------------------------------------------------------------
def _sentence(joint: JointPass, share: Share | None) -> str:
    """What the picture shows."""
    if share is None:
        return "Which samples were given is not known."
    return _ranks(joint) + _found(joint, share) + _extent(joint, share)


def _ranks(joint: JointPass) -> str:
    if joint.by_all:
        return ""
    noun = "rank" if len(joint.passes) == 1 else "ranks"
    return f"Only {noun} {', '.join(map(str, joint.passes))} made this pass. "


def _found(joint: JointPass, share: Share) -> str:
    several, again, unseen = share.counts
    if share.on_every_rank(joint.world):
        sliced = "; of each batch a rank gives the model its part only" if joint.sliced else ""
        return f"All {share.size} samples on every rank{sliced}."
    numbers = ((several, "on several ranks"), (again, "more than once on one rank"), (unseen, "on none"))
    parts = [(n, where) for n, where in numbers if n]
    if not parts:
        return f"Each of {share.size} samples once."
    (first, where), *others = parts
    phrases = [f"{counted(first, 'sample')} {where}", *(f"{n} {where}" for n, where in others)]
    return f"{', '.join(phrases)}, of {share.size}."


def _extent(joint: JointPass, share: Share) -> str:
    """How much of the data set that was, where it was not all of it."""
    if joint.is_stream:
        return " They were read from a stream: what else it holds is not known."
    if joint.finished:
        return ""
    size = len(_whole(joint))
    return f" The pass was not finished{f'; there are {size}' if size > share.size else ''}."


def _loader(joint: JointPass) -> str:
    start = joint.first.start
    parts = [str(start.at or ""), start.type, "" if joint.is_stream else start.sampler]
    parts.append(f"batches of {start.batch_size}" if start.batch_size else "")
    return " · ".join(escape(part) for part in parts if part)


# -- drawing ----------------------------------------------------------------------------------------------------------
def _legend() -> str:
    words = "Samples lie from left to right; the higher a cell, the more of its samples the rank was given."
    items = [
        (box("given"), "given to the rank"),
        (box("several"), "not once: on several ranks, or again"),
        (box("unseen"), "on no rank"),
    ]
    return f'<p class="muted lede">{words}</p>{legend(items)}'


def _figure(title: str, joint: JointPass) -> str:
    share = _share(joint)
    sentence = escape(_sentence(joint, share))
    head = f'<h3>{escape(title)}</h3><p class="muted small">{_loader(joint)}</p>'
    picture = _picture(joint, share, sentence) if share else ""
    return f"<figure>{head}{picture}<figcaption>{sentence}</figcaption></figure>"


def _picture(joint: JointPass, share: Share, sentence: str) -> str:
    sizes = _sizes(share.size)
    filled = {rank: _filled(positions, share.size) / sizes for rank, positions in share.positions.items()}
    most = max(float(cells.max()) for cells in filled.values())
    rows = [(f"rank {rank}", [("given", cells / most)]) for rank, cells in filled.items()]
    if not share.on_every_rank(joint.world) or (joint.first.trains and not joint.sliced):
        several, unseen = _marks(share)
        rows.append(("not once", [("several", several / sizes), ("unseen", unseen / sizes)]))
    names = "".join(f'<div style="height:{_ROW}px">{name}</div>' for name, _ in rows)
    drawn = "".join(_row(cells, n * _ROW, len(sizes)) for n, (_, cells) in enumerate(rows))
    height = _ROW * len(rows)
    svg = (
        f'<svg class="ledger" height="{height}" viewBox="0 0 {len(sizes)} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{sentence}">{drawn}</svg>'
    )
    ends = f'<div class="ends"><span>{share.ends[0]}</span><span>{share.ends[1]}</span></div>'
    return f'<div class="chart"><div class="names">{names}</div>{svg}</div>{ends}'


def _sizes(size: int) -> Bins:
    """Samples in each bin."""
    bins = min(size, _BINS)
    edges = [-(-n * size // bins) for n in range(bins + 1)]
    return np.diff(np.asarray(edges, dtype=np.float64))


def _filled(positions: NDArray[np.int64], size: int) -> Bins:
    """Different samples in each bin."""
    bins = min(size, _BINS)
    return np.bincount(np.unique(positions) * bins // size, minlength=bins).astype(np.float64)


def _marks(share: Share) -> tuple[Bins, Bins]:
    """Samples of each bin that came more than once, and that never came."""
    everything = np.concatenate(list(share.positions.values()))
    seen, times = np.unique(everything, return_counts=True)
    return _filled(seen[times > 1], share.size), _sizes(share.size) - _filled(seen, share.size)


def _row(cells: list[tuple[str, Bins]], top: int, bins: int) -> str:
    height = _ROW - _GAP
    track = f'<rect class="track" y="{top + _GAP / 2:g}" width="{bins}" height="{height}"/>'
    return track + "".join(_path(kind, shares, top + _GAP / 2) for kind, shares in cells)


def _path(kind: str, shares: Bins, top: float) -> str:
    """One shape for a row: equal neighbours are one box. What was never given hangs from above."""
    height, x, boxes = _ROW - _GAP, 0, []
    for share, run in groupby(np.where(shares > 0, np.maximum(shares, _LEAST), 0.0).tolist()):
        width = len(list(run))
        if share > 0:
            y = top if kind == "unseen" else top + height * (1 - share)
            boxes.append(f"M{x} {y:.4g}h{width}v{height * share:.4g}h-{width}z")
        x += width
    return f'<path class="{kind}" d="{"".join(boxes)}"/>' if boxes else ""


def _further(passes: list[tuple[str, JointPass]]) -> str:
    if not passes:
        return ""
    lines = "".join(f"<li>{escape(f'{title}: {_sentence(joint, _share(joint))}')}</li>" for title, joint in passes)
    summary = f"<summary>{len(passes)} further {'pass' if len(passes) == 1 else 'passes'}</summary>"
    return f'<details>{summary}<ul class="list">{lines}</ul></details>'
