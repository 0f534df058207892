"""A new order in every epoch, the same on all ranks."""

from collections.abc import Iterator
from itertools import chain, pairwise

from ..catalog import Finding, finding
from ..events import SamplerOrder
from ..model import Pass, Trace


def judge(trace: Trace) -> Iterator[Finding]:
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
