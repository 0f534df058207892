"""Each sample once: shards of training, splits, evaluation, streams."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from ...watch.ledger import Ledger, tally
from ..catalog import Finding, finding
from ..trace import Rank, Record, Site, Trace, unpacked, where

_MUCH = 0.1
"""Share of a pass above which repeated samples are no rounding to whole batches."""
_ENOUGH = 8
"""Samples below which nothing is concluded from what they have in common."""
_PASSES: WeakKeyDictionary[Rank, list["Pass"]] = WeakKeyDictionary()


@dataclass
class Pass:
    """One way of one rank through a loader."""

    loader: Record
    trains: bool = False
    ended: bool = False
    index: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    batches: int = 0
    waiting: int = 0
    """Batches given, with gradients on, since the last backward pass."""
    rows: int = 0
    """Most samples in a batch."""
    fed: int = 0
    """Most samples that the model was given at once while training on it."""
    after: list[Record] = field(default_factory=list)
    """What came after its end, up to the next backward pass."""
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of some samples, by their places, what each tensor of them is known by."""
    labels: list[int] = field(default_factory=list)
    """Which of the tensors hold one whole number of each sample: it is hardly ever drawn at random."""
    contents: list[tuple[int, int]] = field(default_factory=list)
    """Places of samples, and what they were found to hold."""
    backwards: int = 0

    def add(self, batch: Record) -> None:
        index, hashes = batch.get("index", []), unpacked(batch["hashes"])
        self.index += index
        self.hashes += hashes
        if batch["rows"] == len(index):  # each row is a sample
            self.contents += zip(index, hashes, strict=False)
            parts = [unpacked(part) for part in batch.get("parts", ())]
            self.parts |= dict(zip(index, zip(*parts, strict=True), strict=False))
        self.labels = batch.get("labels", [])
        self.rows = max(self.rows, batch["rows"])
        self.batches += 1
        self.waiting += batch["learns"]

    @property
    def at(self) -> Site | None:
        return where(self.loader)


def passes(rank: Rank) -> list[Pass]:
    """A rank's passes in the order they began."""
    if rank not in _PASSES:
        _PASSES[rank] = _passes(rank)
    return _PASSES[rank]


def _passes(rank: Rank) -> list[Pass]:
    found: dict[tuple[int, int], Pass] = {}
    last: Pass | None = None
    given: list[Pass] = []  # that gave batches since the last backward pass
    after: list[Pass] = []  # that ended, and of which it is not known yet what follows from them
    went_back = False  # since the last step
    for record in rank.records:
        kind, key = record["kind"], (record.get("n"), record.get("epoch"))
        if kind == "loader":
            found[record["n"], record["epoch"]] = Pass(record)
        elif kind == "batch" and key in found:
            last = found[key]
            last.add(record)
            given += [last] if last.waiting == 1 and record["learns"] else []
            if last.batches == last.loader["batches"] and not last.ended:  # some loops never ask for one more
                last.ended = True
                after.append(last)
        elif kind == "pass_end" and key in found and not found[key].ended:
            found[key].ended = True
            after.append(found[key])
        elif kind == "backward" and record["phase"] == "in" and last is not None:
            last.backwards += 1
            _learn_from(given, last)
            given = []
        elif kind == "step" and last is not None and not went_back:  # by torch.autograd.grad
            _learn_from(given, last)
            given = []
        elif kind == "input" and last is not None:
            last.fed = max(last.fed, record.get("rows", 0))
        went_back = kind != "step" and (went_back or kind == "backward")
        after = [one for one in after if not one.trains]
        for one in after:
            one.after.append(record)
        if kind in ("backward", "end"):
            after = []
    most: Counter[Site | None] = Counter()
    for one in found.values():
        most[one.at] = max(most[one.at], one.fed)
    for one in found.values():  # the probes look at the model's inputs now and then only
        one.fed = one.fed or most[one.at]
    return list(found.values())


def _learn_from(given: list[Pass], last: Pass) -> None:
    """Which passes a backward pass belongs to: those that gave one batch for it, or else the one that gave the last."""
    one_each = [p for p in given if p.waiting == 1 and (not p.ended or p is last)]
    for one in one_each or [last]:
        one.trains = True
    for one in given:
        one.waiting = 0


def together(trace: Trace) -> list[list[Pass]]:
    """Passes that ranks make at the same place of the script, the k-th there with the k-th; one list a rank has."""
    tables: list[dict[tuple[Site | None, int], Pass]] = []
    for rank in trace.ranks:
        count: Counter[Site | None] = Counter()
        table = {}
        for one in passes(rank):
            table[one.at, count[one.at]] = one
            count[one.at] += 1
        tables.append(table)
    return [[t[key] for t in tables] for key in tables[0] if all(key in t for t in tables)]


def judge(trace: Trace) -> Iterator[Finding]:
    groups = together(trace)
    if trace.world > 1:
        for group in groups:
            yield from _streams(group) if group[0].loader["streams"] else _shards(group, trace)
        yield from _splits(groups)
        yield from _metrics(groups, trace)
        if not any(g[0].trains for g in groups):
            yield from _inputs(trace)
    yield from _overlap(trace)


def sliced(one: Pass, world: int) -> bool:
    """Whether the script loads whole batches and gives the model its part of them, and not all parts in turn."""
    part = 0 < one.fed * world <= one.rows + world - 1
    return part and one.fed * one.backwards < one.rows * one.batches


def _shards(group: list[Pass], trace: Trace) -> Iterator[Finding]:
    lists, world = [one.index for one in group], trace.world
    if not all(lists) or any(len(set(i)) < 0.9 * len(i) for i in lists):
        return  # nothing known, or drawn with replacement
    if all(one.ended for one in group) and _exactly_once(lists, group[0].loader):
        return
    if (group[0].trains and sliced(group[0], world)) or _own_sets(group, trace):
        return
    counts = Counter(i for part in lists for i in set(part))
    twice = [i for i, n in counts.items() if n > 1]
    at = group[0].at
    if group[0].trains and len(twice) > _MUCH * len(counts):
        share = 100 * len(twice) / len(counts)
        what = f"{share:.0f} % of the training samples are given to several ranks in one epoch"
        seen = f"{len(twice)} of {len(counts)}; sample {twice[0]} on ranks {_holders(lists, twice[0])}"
        yield finding("repeated-samples", what, at, seen, f"sampler: {group[0].loader['sampler']}")
    elif not group[0].trains and twice and not all(set(i) == set(lists[0]) for i in lists):
        who = "1 sample is" if len(twice) == 1 else f"{len(twice)} samples are"
        what = f"{who} evaluated on several ranks, and counted more than once"
        seen = f"{len(counts)} samples, {sum(map(len, lists))} evaluations"
        again = f"sample {twice[0]} on ranks {_holders(lists, twice[0])}"
        yield finding("padded-evaluation", what, at, seen, again)
    yield from _unseen(group, counts, world)


def _own_sets(group: list[Pass], trace: Trace) -> bool:
    """Whether the data sets of the ranks are parts of one, each numbered by itself: ranks have the same numbers, yet
    hardly anything that one was given is on another; and that is not because something is drawn for each."""
    given = Counter(content for one in group for content in set(one.hashes))
    numbers = Counter(place for one in group for place in set(one.index))
    shared = sum(n > 1 for n in numbers.values())
    if not given or sum(n > 1 for n in given.values()) > _MUCH * shared or shared < _ENOUGH:
        return False
    alike = _alike(group)
    return _steady(group[0].at, trace) if alike is None else not alike


def _alike(group: list[Pass]) -> bool | None:
    """Whether places that several ranks were given hold the same samples, by the tensors they are made of: something is
    drawn for some of them, but hardly for their labels. None: it cannot be said."""
    both = [(group[0].parts[n], one.parts[n]) for one in group[1:] for n in one.parts if n in group[0].parts]
    if len(both) < _ENOUGH:
        return None
    equals = differs = False
    for n in range(min(len(part) for pair in both for part in pair)):
        values = Counter(a[n] for a, _ in both)
        chance = sum((count / len(both)) ** 2 for count in values.values())
        equal = sum(a[n] == b[n] for a, b in both) / len(both)
        equals |= equal == 1 and chance ** len(both) < 1e-6  # or it is the number itself
        differs |= n in group[0].labels and len(both) >= 2 * _ENOUGH and equal < 0.8
    return False if differs else True if equals else None


@lru_cache(maxsize=16)
def _steady(at: Site | None, trace: Trace) -> bool:
    """Whether a number that came again, in another epoch, stood for the same."""
    known: dict[tuple[int, int], set[int]] = {}
    again = 0
    for rank in trace.ranks:
        for one in passes(rank):
            for place, content in one.contents if one.at == at else ():
                again += (rank.number, place) in known
                known.setdefault((rank.number, place), set()).add(content)
    return again >= _ENOUGH and all(len(contents) == 1 for contents in known.values())


def _holders(lists: list[list[int]], sample: int) -> str:
    return ", ".join(str(rank) for rank, part in enumerate(lists) if sample in part)


def _exactly_once(lists: list[list[int]], loader: Record) -> bool:
    """By the ledger that every run of Lockstep keeps."""
    if loader["partial"] or loader["size"] is None:
        return False
    ledger = Ledger(loader["size"])
    wrong = ledger.post([{0: tally(np.asarray(part, dtype=np.int64))} for part in lists])
    return wrong is None and ledger.complete == 1


def _unseen(group: list[Pass], counts: Counter[int], world: int) -> Iterator[Finding]:
    first = group[0].loader
    if not all(one.ended for one in group) or first["size"] is None or (first["partial"] and not first["subset"]):
        return
    subsets = [one.loader["subset"] for one in group]
    whole = {i for s in subsets if s is not None for i in s} if any(subsets) else set(range(first["size"]))
    missing = sorted(whole - set(counts))
    if len(missing) >= max(1, (first["batch_size"] or 1) * world):
        what = f"{len(missing)} of {len(whole)} samples are on no rank in a whole epoch"
        kind = "trained on" if group[0].trains else "evaluated"
        yield finding("unseen-samples", what, group[0].at, f"never {kind}: {missing[:5]} …")


def _streams(group: list[Pass]) -> Iterator[Finding]:
    lists = [one.hashes for one in group]
    if not group[0].trains or not all(len(set(h)) >= _ENOUGH for h in lists):
        return
    counts = Counter(h for part in lists for h in set(part))
    shared = sum(n > 1 for n in counts.values()) / len(counts)
    within = max(len(h) / len(set(h)) for h in lists)
    if shared > 0.5:
        what = "every rank reads the whole stream"
        yield finding(
            "unsharded-stream", what, group[0].at, f"{100 * shared:.0f} % of the samples are on several ranks"
        )
    elif within > 1.5:
        what = "every worker reads the whole stream"
        yield finding("unsharded-stream", what, group[0].at, f"each sample comes {within:.0f} times on one rank")


def _splits(groups: list[list[Pass]]) -> Iterator[Finding]:
    for group in groups:
        subsets = [one.loader["subset"] for one in group]
        if not all(subsets):
            continue
        sets = [set(s) for s in subsets]
        for rank, other in enumerate(sets[1:], 1):
            shared = sets[0] & other
            if other != sets[0] and len(shared) > _MUCH * len(other):
                what = "the data set is split differently on different ranks"
                seen = f"rank 0 and rank {rank} share {len(shared)} of {len(other)} samples of this part"
                yield finding("differing-splits", what, group[0].at, seen)
                return


def _overlap(trace: Trace) -> Iterator[Finding]:
    alike = _numbered_alike(trace)
    for ranks in [trace.ranks] if alike else [[rank] for rank in trace.ranks]:
        if found := _trained_on([one for rank in ranks for one in passes(rank)]):
            yield found
            return


def _numbered_alike(trace: Trace) -> bool:
    """Whether all ranks came upon their data sets in one order, and so mean the same by their numbers."""
    tables: list[dict[int, tuple[object, ...]]] = [{} for _ in trace.ranks]
    for table, rank in zip(tables, trace.ranks, strict=True):
        for one in passes(rank):
            about = one.loader["type"], one.loader["size"], one.loader["partial"]
            table.setdefault(one.loader["dataset"], about)
    return all(table[n] == tables[0][n] for table in tables for n in table.keys() & tables[0].keys())


def _trained_on(everything: list[Pass]) -> Finding | None:
    training = _by_set(one for one in everything if one.trains)
    for test in _by_set(one for one in everything if not one.trains and one.index):
        for train in training:
            same = train.loader["dataset"] == test.loader["dataset"]
            if same and train.loader["subset"] == test.loader["subset"]:
                continue  # how well the training set itself is fitted
            if same and (test.loader["partial"] or train.loader["partial"]):
                shared = set(train.index) & set(test.index)
            elif not same and len(set(test.hashes)) >= _ENOUGH:
                shared = set(train.hashes) & set(test.hashes)
                shared = shared if len(shared) > 0.02 * len(set(test.hashes)) else set()
            else:
                continue
            if shared:
                what = f"{len(shared)} of the samples evaluated here are trained on"
                return finding("overlapping-splits", what, test.at, f"trained on at {train.at}")
    return None


def _by_set(found: Iterable[Pass]) -> list[Pass]:
    """Passes at one place over one set, as one."""
    sets: dict[object, Pass] = {}
    for one in found:
        subset = one.loader["subset"]
        key = (one.at, one.loader["dataset"], one.loader["partial"], tuple(subset) if subset else None)
        whole = sets.setdefault(key, Pass(one.loader))
        whole.index += one.index
        whole.hashes += one.hashes
    return list(sets.values())


def _metrics(groups: list[list[Pass]], trace: Trace) -> Iterator[Finding]:
    for group in groups:
        first = group[0]
        if first.trains or not first.ended or not trace.ranks[0].steps:
            continue
        own = _own_sets(group, trace)
        lists = [one.hashes if own else one.index or one.hashes for one in group]
        if not all(lists) or any(set(part) & set(lists[0]) == set(part) for part in lists[1:]):
            continue  # unknown, or every rank evaluates everything
        later = _until_training(first.after)
        if later is not None and not any(map(_brings_together, later)) and not _inside(first, trace.ranks[0]):
            what = "each rank evaluates a part of the set, and the parts are never put together"
            sizes = ", ".join(f"rank {n}: {len(part)} samples" for n, part in enumerate(lists))
            yield finding("local-metric", what, first.at, sizes)
            return


def _until_training(records: list[Record]) -> list[Record] | None:
    """What follows an evaluation; None if the audit ended before it was used."""
    for n, record in enumerate(records):
        if record["kind"] in ("backward", "end"):
            return [r for r in records[:n] if not (r["kind"] == "collective" and r["t"] >= _reading(records[:n]))]
    return None


def _reading(records: list[Record]) -> float:
    """When the loader of the next training begins, whose library may speak over the network itself."""
    begun = [r["t"] for r in records if r["kind"] == "loader"]
    return begun[-1] if begun else float("inf")


def _brings_together(record: Record) -> bool:
    """Whether a record is of a collective that may carry a metric. Libraries also use some to agree on what to do."""
    if record["kind"] != "collective" or record["phase"] != "in":
        return False
    if record["op"] in ("barrier", "broadcast", "broadcast_object_list"):
        return False
    return not record["by_library"] or "gather" in record["op"] or str(record.get("dtype")).startswith("float")


def _inside(one: Pass, rank: Rank) -> bool:
    """Whether ranks met while the pass went on: metrics that are reduced batch by batch."""
    start, number = one.loader["t"], (one.loader["n"], one.loader["epoch"])
    end = next((r["t"] for r in rank.of("pass_end") if (r["n"], r["epoch"]) == number), start)
    return any(start <= c["t"] <= end for c in rank.of("collective") if _brings_together(c))


def _inputs(trace: Trace) -> Iterator[Finding]:
    """Without a loader to watch: whether the model is given the same on all ranks."""
    looks = [[r for r in rank.of("input") if len(set(unpacked(r.get("hashes", "")))) >= 2] for rank in trace.ranks]
    tables = [{r["n"]: r for r in rank} for rank in looks]
    shared = sorted(set.intersection(*(set(t) for t in tables)))
    if len(shared) >= 2 and all(len({t[n]["hashes"] for t in tables}) == 1 for n in shared):
        what = "all ranks give the model the same samples"
        seen = f"{len(shared)} of {len(shared)} batches compared are equal"
        yield finding("repeated-samples", what, where(tables[0][shared[0]]), seen)
