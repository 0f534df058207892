"""A new order in every epoch, the same on all ranks."""

from collections.abc import Iterator
from itertools import chain, pairwise

from ..catalog import Finding, finding
from ..trace import Trace, where
from .samples import passes, together


def judge(trace: Trace) -> Iterator[Finding]:
    orders = [rank.of("order") for rank in trace.ranks]
    for records in zip(*orders, strict=False):
        epochs = [r["epoch"] for r in records]
        if len(set(epochs)) > 1 and records[0]["shuffles"]:
            values = ", ".join(f"rank {n}: {e}" for n, e in enumerate(epochs))
            yield finding("differing-epoch", "set_epoch is called with different values", where(records[0]), values)
            break
    training = [one for one in passes(trace.ranks[0]) if one.trains and one.index]
    if trace.world > 1 and not together(trace):
        return
    sites = dict.fromkeys(one.at for one in training)  # a look at one batch elsewhere is no epoch
    for before, after in chain.from_iterable(pairwise([one for one in training if one.at == at]) for at in sites):
        n = min(len(before.index), len(after.index))
        shuffled = not before.loader["in_order"]
        if n < 8 or not before.ended or before.loader["size"] != after.loader["size"] or not shuffled:
            continue
        if before.index[:n] == after.index[:n] and before.index[:n] != sorted(before.index[:n]):
            cure = "its sampler has set_epoch, " if before.loader["follows_epochs"] else ""
            seen = f"{cure}epochs {before.loader['epoch']} and {after.loader['epoch']}: {before.index[:6]} …"
            yield finding("same-order", "two epochs have the same order", before.at, seen)
            return
