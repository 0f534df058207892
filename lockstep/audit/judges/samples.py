"""Each sample once in an epoch, in a new order in every epoch: shards of training, splits, evaluation, streams."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice, pairwise, takewhile

from ..catalog import Finding, finding
from ..decisions import decides
from ..events import (
    Backward,
    Collective,
    End,
    Event,
    ModelInput,
    PaddingDropped,
    PassEnd,
    PassStart,
    Reduced,
    SamplerOrder,
    Save,
)  # fmt: skip
from ..model import JointPass, Pass, Rank, Trace
from ..recorder import unpacked
from ..source import Site, cuts_off

_MUCH = 0.1
"""Share of a pass above which repeated samples are no rounding to whole batches."""
_ENOUGH = 8
"""Samples below which nothing is concluded from what they have in common."""


def judge(trace: Trace) -> Iterator[Finding]:
    if trace.world > 1:
        joints = [joint for joint in trace.joint_passes if joint.by_all]
        groups = [list(joint.passes.values()) for joint in joints]
        for joint, group in zip(joints, groups, strict=True):
            yield from _streams(group) if joint.is_stream else _shards(joint, group, trace)
        yield from _splits(groups)
        yield from _metrics(groups, trace)
        if not any(group[0].trains for group in groups):
            yield from _inputs(trace)
    yield from _overlap(trace)
    yield from _orders(trace)


def _shards(joint: JointPass, group: list[Pass], trace: Trace) -> Iterator[Finding]:
    lists, first = [one.index for one in group], group[0]
    distinct = 0.9 if first.trains else 0.5  # a small set is padded by much of it
    if not all(lists) or any(len(set(i)) < distinct * len(i) for i in lists):
        return  # nothing known, or drawn with replacement
    if joint.sliced or _own_sets(group, trace):
        return
    counts = Counter(i for part in lists for i in (set(part) if first.trains else part))
    twice = [i for i, n in counts.items() if n > 1]
    holders = ", ".join(str(rank) for rank, part in enumerate(lists) if twice and twice[0] in part)
    example = f"sample {twice[0]} on ranks {holders}" if twice else ""
    if first.trains and len(twice) > _MUCH * len(counts):
        share = 100 * len(twice) / len(counts)
        what = f"{share:.0f} % of the training samples are given to several ranks in one epoch"
        seen = f"{len(twice)} of {len(counts)}; {example}"
        yield finding("repeated-samples", what, first.at, seen, f"sampler: {first.start.sampler}")
    elif not first.trains and twice and not _all_evaluate(lists) and not _padding_is_dropped(first, trace, len(counts)):
        samples = "1 sample is" if len(twice) == 1 else f"{len(twice)} samples are"
        what = f"{samples} evaluated more than once, and counted as often"
        seen = f"{len(counts)} samples, {sum(map(len, lists))} evaluations"
        yield finding("padded-evaluation", what, first.at, seen, example)
    yield from _unseen(joint, counts)


def _all_evaluate(lists: list[list[int]]) -> bool:
    return all(set(part) == set(lists[0]) for part in lists)


def _padding_is_dropped(one: Pass, trace: Trace, samples: int) -> bool:
    """Whether what was evaluated twice reaches no metric: a library drops it, a count over all ranks is the number of
    samples, or the script cuts off what it has gathered."""
    rank = trace.ranks[0]
    later = (event for event in rank.events if event.t >= one.start.t)
    used = list(takewhile(lambda event: not isinstance(event, Backward), later))
    counts: Counter[tuple[Site | None, int]] = Counter()
    for event in used:
        for n, value in enumerate(event.values if isinstance(event, Reduced) else ()):
            counts[event.at, n] += value  # type: ignore[assignment]
            if samples in (value, counts[event.at, n]):
                return True
    gathers = any(isinstance(event, Collective) and "gather" in event.op for event in used)
    return any(isinstance(event, PaddingDropped) for event in used) or (gathers and cuts_off(rank.files))


def _own_sets(group: list[Pass], trace: Trace) -> bool:
    """Whether each rank has a data set of its own, a part of the whole, with indices that start from 0 again: ranks
    have the same indices, but hardly any sample of one is on another; and random augmentation is not the reason."""
    hashes = Counter(content for one in group for content in set(one.hashes))
    indices = Counter(i for one in group for i in set(one.index))
    shared = sum(n > 1 for n in indices.values())
    if not hashes or sum(n > 1 for n in hashes.values()) > _MUCH * shared or shared < _ENOUGH:
        return False
    same = _same_samples(group)
    return _no_augmentation(group[0].at, trace) if same is None else not same


def _same_samples(group: list[Pass]) -> bool | None:
    """Whether one index is the same sample on all ranks, by the tensors of it: some may be drawn at random, labels
    hardly ever. None: too little is known."""
    both = [(group[0].parts[n], one.parts[n]) for one in group[1:] for n in one.parts if n in group[0].parts]
    if len(both) < _ENOUGH:
        return None
    equals = differs = False
    for n in range(min(len(part) for pair in both for part in pair)):
        values = Counter(a[n] for a, _ in both)
        chance = sum((count / len(both)) ** 2 for count in values.values())
        equal = sum(a[n] == b[n] for a, b in both) / len(both)
        equals |= equal == 1 and chance ** len(both) < 1e-6  # or it is the index itself
        differs |= n in group[0].labels and len(both) >= 2 * _ENOUGH and equal < 0.8
    return False if differs else True if equals else None


@lru_cache(maxsize=16)
def _no_augmentation(at: Site | None, trace: Trace) -> bool:
    """Whether an index that came again on one rank, in another epoch, had the same content."""
    known: dict[tuple[int, int], set[int]] = {}
    again = 0
    for rank in trace.ranks:
        for index, content in (c for one in rank.passes if one.at == at for c in one.contents):
            again += (rank.number, index) in known
            known.setdefault((rank.number, index), set()).add(content)
    return again >= _ENOUGH and all(len(contents) == 1 for contents in known.values())


def _unseen(joint: JointPass, counts: Counter[int]) -> Iterator[Finding]:
    start, whole = joint.first.start, joint.indices
    if not joint.finished or whole is None:
        return
    missing = [i for i in whole if i not in counts]
    if len(missing) >= max(1, (start.batch_size or 1) * joint.world):
        what = f"{len(missing)} of {len(whole)} samples are on no rank in a whole epoch"
        verb = "trained on" if joint.first.trains else "evaluated"
        yield finding("unseen-samples", what, joint.first.at, f"never {verb}: {missing[:5]} …")


def _streams(group: list[Pass]) -> Iterator[Finding]:
    lists = [one.hashes for one in group]
    if not group[0].trains or not all(len(set(h)) >= _ENOUGH for h in lists):
        return
    counts = Counter(h for part in lists for h in set(part))
    shared = sum(n > 1 for n in counts.values()) / len(counts)
    repeats = max(len(h) / len(set(h)) for h in lists)
    if shared > 0.5:
        seen = f"{100 * shared:.0f} % of the samples are on several ranks"
        yield finding("unsharded-stream", "every rank reads the whole stream", group[0].at, seen)
    elif repeats > 1.5:
        seen = f"each sample comes {repeats:.0f} times on one rank"
        yield finding("unsharded-stream", "every worker reads the whole stream", group[0].at, seen)


def _splits(groups: list[list[Pass]]) -> Iterator[Finding]:
    for group in groups:
        sets = [set(one.start.subset or ()) for one in group]
        for rank, other in enumerate(sets[1:], 1) if all(sets) else ():
            shared = sets[0] & other
            if other != sets[0] and len(shared) > _MUCH * len(other):
                what = "the data set is split differently on different ranks"
                seen = f"rank 0 and rank {rank} share {len(shared)} of {len(other)} samples of this part"
                yield finding("differing-splits", what, group[0].at, seen)
                return


# -- training and evaluation ------------------------------------------------------------------------------------------
def _overlap(trace: Trace) -> Iterator[Finding]:
    together = [trace.ranks] if _same_numbering(trace) else [[rank] for rank in trace.ranks]
    found = (_trained_on([one for rank in ranks for one in rank.passes]) for ranks in together)
    yield from islice(filter(None, found), 1)


def _same_numbering(trace: Trace) -> bool:
    """Whether all ranks used their data sets in one order, so that the same number is the same data set."""
    tables: list[dict[int, tuple[object, ...]]] = []
    for rank in trace.ranks:
        starts = [one.start for one in reversed(rank.passes)]
        tables.append({start.dataset: (start.type, start.size, start.is_subset) for start in starts})
    return all(table[n] == tables[0][n] for table in tables for n in table.keys() & tables[0].keys())


def _trained_on(passes: list[Pass]) -> Finding | None:
    training = _by_set(one for one in passes if one.trains)
    for test in _by_set(one for one in passes if not one.trains and one.index):
        for train in training:
            if shared := _shared(train, test):
                what = f"{shared} of the samples evaluated here are trained on"
                return finding("overlapping-splits", what, test.at, f"trained on at {train.at}")
    return None


def _shared(train: Pass, test: Pass) -> int:
    """How many samples two passes share, by index in one data set or by content in two."""
    if train.start.dataset == test.start.dataset:
        same = train.start.subset == test.start.subset  # how well the training set itself is fitted
        parts = test.start.is_subset or train.start.is_subset
        return len(set(train.index) & set(test.index)) if parts and not same else 0
    hashes = set(test.hashes)
    shared = len(set(train.hashes) & hashes)
    return shared if len(hashes) >= _ENOUGH and shared > 0.02 * len(hashes) else 0


def _by_set(passes: Iterable[Pass]) -> list[Pass]:
    """Passes at one line over one data set, as one."""
    sets: dict[object, Pass] = {}
    for one in passes:
        subset = one.start.subset
        key = (one.at, one.start.dataset, one.start.is_subset, tuple(subset) if subset else None)
        whole = sets.setdefault(key, Pass(one.start))
        whole.index += one.index
        whole.hashes += one.hashes
    return list(sets.values())


# -- metrics ----------------------------------------------------------------------------------------------------------
def _metrics(groups: list[list[Pass]], trace: Trace) -> Iterator[Finding]:
    rank = trace.ranks[0]
    for group in groups:
        first = group[0]
        if first.trains or not first.ended or not rank.steps:
            continue
        own = _own_sets(group, trace)
        lists = [one.hashes if own else one.index or one.hashes for one in group]
        if not all(lists) or any(set(part) <= set(lists[0]) for part in lists[1:]):
            continue  # unknown, or every rank evaluates everything
        later = _until_training(first.after)
        if later is not None and not any(map(_may_reduce_metric, later)) and not _reduced_inside(first, rank):
            what = "each rank evaluates a part of the set, and the parts are never put together"
            sizes = ", ".join(f"rank {n}: {len(part)} samples" for n, part in enumerate(lists))
            use = decides(first.at, (e.at for e in later if isinstance(e, Save)))
            seen = [sizes, f"the value of one part {use}"] if use else [sizes]
            yield finding("local-metric", what, first.at, *seen, severity="error" if use else None)
            return


def _until_training(events: list[Event]) -> list[Event] | None:
    """What follows an evaluation, without collectives after the loader of the next training is iterated, whose library
    may call some itself; None if the audit ended before the metric was used."""
    for n, event in enumerate(events):
        if isinstance(event, (Backward, End)):
            starts = [e.t for e in events[:n] if isinstance(e, PassStart)]
            return [e for e in events[:n] if not starts or e.t < starts[-1]]
    return None


def _may_reduce_metric(event: Event) -> bool:
    """Whether a collective may carry a metric. Libraries also call some to agree on what to do next."""
    if not isinstance(event, Collective) or event.op in ("barrier", "broadcast", "broadcast_object_list"):
        return False
    return not event.by_library or "gather" in event.op or str(event.dtype).startswith("float")


def _reduced_inside(one: Pass, rank: Rank) -> bool:
    """Whether metrics may be reduced batch by batch, while the pass goes on."""
    start = one.start
    ends = (e.t for e in rank.of(PassEnd) if (e.loader, e.epoch) == (start.loader, start.epoch))
    end = next(ends, start.t)
    return any(start.t <= call.t <= end for call in rank.of(Collective) if _may_reduce_metric(call))


def _inputs(trace: Trace) -> Iterator[Finding]:
    """Without a loader to watch: whether the model is given the same on all ranks."""
    inputs = trace.by_key(ModelInput, lambda given: given.n if len(set(unpacked(given.hashes))) >= 2 else None)
    if len(inputs) >= 2 and all(len({given.hashes for given in ranks}) == 1 for ranks in inputs.values()):
        seen = f"{len(inputs)} of {len(inputs)} batches compared are equal"
        at = next(iter(inputs.values()))[0].at
        yield finding("repeated-samples", "all ranks give the model the same samples", at, seen)


# -- order ------------------------------------------------------------------------------------------------------------
def _orders(trace: Trace) -> Iterator[Finding]:
    if orders := trace.difference(SamplerOrder, lambda order: order.epoch if order.shuffle else None):
        values = ", ".join(f"rank {n}: {order.epoch}" for n, order in enumerate(orders))
        yield finding("differing-epoch", "set_epoch is called with different values", orders[0].at, values)
    if trace.world > 1 and not any(joint.by_all for joint in trace.joint_passes):
        return
    training = [one for one in trace.ranks[0].passes if one.trains and one.index]
    lines = dict.fromkeys(one.at for one in training)  # one batch loaded at another line is no epoch
    for before, after in chain.from_iterable(pairwise([one for one in training if one.at == at]) for at in lines):
        if _same_order(before, after):
            cause = "its sampler has set_epoch, " if before.start.has_set_epoch else ""
            seen = f"{cause}epochs {before.start.epoch} and {after.start.epoch}: {before.index[:6]} …"
            yield finding("same-order", "two epochs have the same order", before.at, seen)
            return


def _same_order(before: Pass, after: Pass) -> bool:
    n = min(len(before.index), len(after.index))
    if n < 8 or not before.ended or before.start.size != after.start.size or before.start.in_order:
        return False
    return before.index[:n] == after.index[:n] and before.index[:n] != sorted(before.index[:n])
