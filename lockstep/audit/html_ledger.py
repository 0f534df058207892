"""The sample ledger of the report: which samples each rank was given in each pass, and which came not once."""

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from .html_parts import box, counted, legend, section
from .judge.samples import Pass, passes, sliced
from .trace import Site, Trace

_BINS, _ROW, _GAP = 120, 20, 4
_PICTURES = 8
"""Passes after these are told in a sentence only."""
_LEAST = 0.2
"""Height of what would be too low to be seen."""
Bins = NDArray[np.float64]


@dataclass(frozen=True)
class Visit:
    """A pass at one place of the script, by the ranks that made it."""

    title: str
    passes: dict[int, Pass]
    world: int

    @property
    def first(self) -> Pass:
        return next(iter(self.passes.values()))

    @property
    def streams(self) -> bool:
        return bool(self.first.loader["streams"])

    @property
    def finished(self) -> bool:
        """By all ranks; an evaluation may be made by some only."""
        made = len(self.passes) == self.world or not self.first.trains
        return made and all(one.ended for one in self.passes.values())

    @property
    def samples(self) -> dict[int, list[int]]:
        """By rank: numbers of samples in the data set; of a stream, what tells its samples apart."""
        return {rank: one.hashes if self.streams else one.index for rank, one in self.passes.items()}

    @property
    def slices(self) -> bool:
        """Whether the ranks load the same batches and give the model a part of them each."""
        return self.first.trains and sliced(self.first, self.world)


@dataclass(frozen=True)
class Share:
    """A visit's samples by their place from 0 to size: all there are, or those given if it is not known how many."""

    places: dict[int, NDArray[np.int64]]
    size: int
    ends: tuple[str, str]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples on several ranks, several times on one, on none."""
        distinct = [np.unique(p) for p in self.places.values()]
        seen, ranks = np.unique(np.concatenate(distinct), return_counts=True)
        _, times = np.unique(np.concatenate(list(self.places.values())), return_counts=True)
        return int((ranks > 1).sum()), int(((times > 1) & (ranks == 1)).sum()), self.size - len(seen)

    def on_every_rank(self, world: int) -> bool:
        return 1 < len(self.places) == world and all(len(np.unique(p)) == self.size for p in self.places.values())


def ledger(trace: Trace) -> str:
    """The section."""
    visits = _visits(trace)
    if not visits:
        text = "No sample came from a DataLoader, so there is nothing to enter here."
        return section("samples", "Samples", f'<p class="muted">{text}</p>')
    figures = "".join(_figure(visit) for visit in visits[:_PICTURES])
    return section(
        "samples", "Samples", _legend(), f'<div class="passes">{figures}</div>', _further(visits[_PICTURES:])
    )


def _visits(trace: Trace) -> list[Visit]:
    """Passes at one place, the k-th there of each rank with the k-th of the others, as they began."""
    table: dict[tuple[Site | None, int], dict[int, Pass]] = {}
    for rank in trace.ranks:
        count: Counter[Site | None] = Counter()
        for one in passes(rank):
            table.setdefault((one.at, count[one.at]), {})[rank.number] = one
            count[one.at] += 1
    groups = [{n: one for n, one in g.items() if one.rows or one.index} for g in table.values()]
    groups = sorted(filter(None, groups), key=lambda g: min(one.loader["t"] for one in g.values()))
    titles: Counter[str] = Counter()
    visits = []
    for group in groups:
        name = "Training" if any(one.trains for one in group.values()) else "Evaluation"
        titles[name] += 1
        visits.append(Visit(f"{name}, pass {titles[name]}", group, trace.world))
    return visits


def _share(visit: Visit) -> Share | None:
    """None if it is not known which samples a rank was given."""
    samples = visit.samples
    if not all(samples.values()):
        return None
    if visit.streams:
        return _in_order_of_arrival(samples)
    seen = _distinct(samples)
    whole = _whole(visit) if visit.finished else seen
    if isinstance(whole, int):
        return Share(
            {n: np.asarray(p, dtype=np.int64) for n, p in samples.items()}, whole, ("sample 0", str(whole - 1))
        )
    places = {n: np.searchsorted(whole, np.asarray(p, dtype=np.int64)) for n, p in samples.items()}
    return Share(places, len(whole), (f"sample {whole[0]}", str(whole[-1])))


def _distinct(samples: dict[int, list[int]]) -> NDArray[np.int64]:
    return np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in samples.values()]))


def _in_order_of_arrival(samples: dict[int, list[int]]) -> Share:
    order: dict[int, int] = {}
    for part in samples.values():
        for one in part:
            order.setdefault(one, len(order))
    places = {n: np.asarray([order[one] for one in part], dtype=np.int64) for n, part in samples.items()}
    return Share(places, len(order), ("in the order they came", ""))


def _whole(visit: Visit) -> int | NDArray[np.int64]:
    """The samples that there are: how many, or if they are a part of the data set, which."""
    seen = _distinct(visit.samples)
    subsets = [one.loader["subset"] for one in visit.passes.values()]
    if any(subsets):
        return np.union1d(seen, _distinct({n: s for n, s in enumerate(subsets) if s}))
    size = visit.first.loader["size"]
    return int(size) if size is not None and seen[-1] < size else seen


# -- words ------------------------------------------------------------------------------------------------------------
def _sentence(visit: Visit, share: Share | None) -> str:
    """What the picture shows."""
    if share is None:
        return "Which samples were given is not known."
    return _who(visit) + _found(visit, share) + _extent(visit, share)


def _who(visit: Visit) -> str:
    if len(visit.passes) == visit.world:
        return ""
    noun = "rank" if len(visit.passes) == 1 else "ranks"
    return f"Only {noun} {', '.join(map(str, visit.passes))} made this pass. "


def _found(visit: Visit, share: Share) -> str:
    several, again, unseen = share.counts
    if share.on_every_rank(visit.world):
        sliced = "; of each batch a rank gives the model its part only" if visit.slices else ""
        return f"All {share.size} samples on every rank{sliced}."
    numbers = ((several, "on several ranks"), (again, "more than once on one rank"), (unseen, "on none"))
    parts = [(n, where) for n, where in numbers if n]
    if not parts:
        return f"Each of {share.size} samples once."
    (first, where), *others = parts
    words = [f"{counted(first, 'sample')} {where}", *(f"{n} {where}" for n, where in others)]
    return f"{', '.join(words)}, of {share.size}."


def _extent(visit: Visit, share: Share) -> str:
    """How much of the data set that was, where it was not all of it."""
    if visit.streams:
        return " They were read from a stream: what else it holds is not known."
    if visit.finished:
        return ""
    whole = _whole(visit)
    size = whole if isinstance(whole, int) else len(whole)
    return f" The pass was not finished{f'; there are {size}' if size > share.size else ''}."


def _setting(visit: Visit) -> str:
    loader = visit.first.loader
    parts = [
        str(visit.first.at) if visit.first.at else "",
        loader["type"],
        loader["sampler"] if not visit.streams else "",
    ]
    parts.append(f"batches of {loader['batch_size']}" if loader["batch_size"] else "")
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


def _figure(visit: Visit) -> str:
    share = _share(visit)
    sentence = escape(_sentence(visit, share))
    head = f'<h3>{escape(visit.title)}</h3><p class="muted small">{_setting(visit)}</p>'
    picture = _picture(visit, share, sentence) if share else ""
    return f"<figure>{head}{picture}<figcaption>{sentence}</figcaption></figure>"


def _picture(visit: Visit, share: Share, sentence: str) -> str:
    sizes = _sizes(share.size)
    filled = {rank: _filled(places, share.size) / sizes for rank, places in share.places.items()}
    most = max(float(cells.max()) for cells in filled.values())
    rows = [(f"rank {rank}", [("given", cells / most)]) for rank, cells in filled.items()]
    if not share.on_every_rank(visit.world) or (visit.first.trains and not visit.slices):
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


def _filled(places: NDArray[np.int64], size: int) -> Bins:
    """Different samples in each bin."""
    bins = min(size, _BINS)
    return np.bincount(np.unique(places) * bins // size, minlength=bins).astype(np.float64)


def _marks(share: Share) -> tuple[Bins, Bins]:
    """Samples of each bin that came more than once, and that never came."""
    everything = np.concatenate(list(share.places.values()))
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


def _further(visits: list[Visit]) -> str:
    if not visits:
        return ""
    lines = "".join(f"<li>{escape(v.title)}: {escape(_sentence(v, _share(v)))}</li>" for v in visits)
    summary = f"<summary>{len(visits)} further {'pass' if len(visits) == 1 else 'passes'}</summary>"
    return f'<details>{summary}<ul class="list">{lines}</ul></details>'
