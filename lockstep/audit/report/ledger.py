"""The sample ledger of the page: which samples each rank was given in each pass, and which not exactly once."""

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..model import JointPass, Trace
from ..verdict import counted
from .parts import box, chart, legend, lines, muted, section

_BINS, _ROW, _GAP = 120, 20, 4
_PICTURES = 8
"""Further passes have a sentence only."""
_LEAST = 0.2
"""Height of what would be too low to be seen."""
_CAPTION = muted(
    "Samples lie from left to right; the higher a cell, the more of its samples the rank was given.", "muted lede"
)
_LEGEND = legend(
    [
        (box("given"), "given to the rank"),
        (box("several"), "not once: on several ranks, or again"),
        (box("unseen"), "on no rank"),
    ]
)


@dataclass(frozen=True)
class Share:
    """How often each rank was given each sample: of all there are, or of those given if that is not known."""

    times: NDArray[np.int64]
    """By rank and sample."""
    ends: tuple[str, str]
    """Names of the first and the last sample."""

    @property
    def size(self) -> int:
        return self.times.shape[1]

    @property
    def total(self) -> NDArray[np.int64]:
        return self.times.sum(0)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples on several ranks, several times on one, on none."""
        ranks = (self.times > 0).sum(0)
        return int((ranks > 1).sum()), int(((self.total > 1) & (ranks == 1)).sum()), int((ranks == 0).sum())

    def on_every_rank(self, world: int) -> bool:
        return 1 < len(self.times) == world and bool(self.times.all())

    def binned(self, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """In each bin, from left to right, the share of its samples that are chosen."""
        bins = min(self.size, _BINS)
        edges = -(-np.arange(bins + 1) * self.size // bins)
        return np.add.reduceat(chosen.astype(np.float64), edges[:-1]) / np.diff(edges)


def ledger(trace: Trace) -> str:
    """The section."""
    passes = _passes(trace)
    if not passes:
        return section("samples", "Samples", muted("No sample came from a DataLoader, so the ledger is empty."))
    figures = "".join(_figure(title, joint) for title, joint in passes[:_PICTURES])
    pictures = f'<div class="passes">{figures}</div>'
    return section("samples", "Samples", _CAPTION, _LEGEND, pictures, _further(passes[_PICTURES:]))


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
    parts = [np.asarray(part, np.uint64 if joint.is_stream else np.int64) for part in joint.samples.values()]
    if not all(map(len, parts)):
        return None
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
    return Share(np.stack([np.bincount(part, minlength=len(whole)) for part in by_rank]), ends)


# -- words ------------------------------------------------------------------------------------------------------------
def _sentence(joint: JointPass, share: Share | None) -> str:
    """What the picture shows."""
    if share is None:
        return "Which samples were given is not known."
    ranks = f"{'rank' if len(joint.passes) == 1 else 'ranks'} {', '.join(map(str, joint.passes))}"
    return ("" if joint.by_all else f"Only {ranks} made this pass. ") + _found(joint, share) + _extent(joint, share)


def _found(joint: JointPass, share: Share) -> str:
    if share.on_every_rank(joint.world):
        sliced = "; of each batch a rank gives the model its part only" if joint.sliced else ""
        return f"All {share.size} samples on every rank{sliced}."
    words = ("on several ranks", "more than once on one rank", "on none")
    parts = [(n, where) for n, where in zip(share.counts, words, strict=True) if n]
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
    size = len(joint.indices) if joint.indices is not None else 0
    return f" The pass was not finished{f'; there are {size}' if size > share.size else ''}."


# -- drawing ----------------------------------------------------------------------------------------------------------
def _figure(title: str, joint: JointPass) -> str:
    share, start = _share(joint), joint.first.start
    sentence = escape(_sentence(joint, share))
    batches = f"batches of {start.batch_size}" if start.batch_size else ""
    loader = filter(None, [str(start.at or ""), start.type, "" if joint.is_stream else start.sampler, batches])
    head = f'<h3>{escape(title)}</h3><p class="muted small">{" · ".join(map(escape, loader))}</p>'
    picture = _picture(joint, share, sentence) if share else ""
    return f"<figure>{head}{picture}<figcaption>{sentence}</figcaption></figure>"


def _picture(joint: JointPass, share: Share, sentence: str) -> str:
    filled = [share.binned(times > 0) for times in share.times]
    most = max(float(cells.max()) for cells in filled)
    rows = [(f"rank {rank}", {"given": cells / most}) for rank, cells in zip(joint.passes, filled, strict=True)]
    if not share.on_every_rank(joint.world) or (joint.first.trains and not joint.sliced):
        total = share.total
        rows.append(("not once", {"several": share.binned(total > 1), "unseen": share.binned(total == 0)}))
    bins, height = len(filled[0]), _ROW * len(rows)
    drawn = "".join(_row(cells, n * _ROW + _GAP / 2, bins) for n, (_, cells) in enumerate(rows))
    svg = (
        f'<svg class="ledger" height="{height}" viewBox="0 0 {bins} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{sentence}">{drawn}</svg>'
    )
    ends = f'<div class="ends"><span>{share.ends[0]}</span><span>{share.ends[1]}</span></div>'
    return chart([name for name, _ in rows], f"height:{_ROW}px", svg) + ends


def _row(cells: dict[str, NDArray[np.float64]], top: float, bins: int) -> str:
    """A shape for each kind: equal neighbours are one box. What was never given hangs from above."""
    height = _ROW - _GAP
    drawn = f'<rect class="track" y="{top:g}" width="{bins}" height="{height}"/>'
    for kind, shares in cells.items():
        x, boxes = 0, []
        for share, run in groupby(np.where(shares > 0, np.maximum(shares, _LEAST), 0.0).tolist()):
            width = len(list(run))
            if share > 0:
                y = top if kind == "unseen" else top + height * (1 - share)
                boxes.append(f"M{x} {y:.4g}h{width}v{height * share:.4g}h-{width}z")
            x += width
        drawn += f'<path class="{kind}" d="{"".join(boxes)}"/>' if boxes else ""
    return drawn


def _further(passes: list[tuple[str, JointPass]]) -> str:
    if not passes:
        return ""
    summary = f"<summary>{len(passes)} further {'pass' if len(passes) == 1 else 'passes'}</summary>"
    sentences = (f"{title}: {_sentence(joint, _share(joint))}" for title, joint in passes)
    return f"<details>{summary}{lines('list', sentences)}</details>"
