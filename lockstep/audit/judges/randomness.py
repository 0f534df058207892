"""Noise, dropout and augmentation of different ranks are different."""

from collections import defaultdict
from collections.abc import Iterator

from ..catalog import Finding, finding
from ..events import Fetch, ModelInput, PassStart, RandomDraw
from ..model import Trace


def judge(trace: Trace) -> Iterator[Finding]:
    yield from _workers(trace)
    if trace.world > 1:
        yield from _draws(trace)
        yield from _dropout(trace)
        yield from _augmentation(trace)


def _draws(trace: Trace) -> Iterator[Finding]:
    draws = trace.by_key(RandomDraw, lambda draw: (draw.step, draw.n, draw.function, tuple(draw.shape)))
    equal = [key for key, ranks in draws.items() if len({draw.checksum for draw in ranks}) == 1]
    if equal and len(equal) >= len(draws) // 2:
        step, _, name, shape = equal[0]
        seen = f"torch.{name}{shape} in step {step} gave the same numbers on all {trace.world} ranks"
        yield finding("same-randomness", "all ranks draw the same noise", draws[equal[0]][0].at, seen)


def _dropout(trace: Trace) -> Iterator[Finding]:
    inputs = trace.by_key(ModelInput, lambda given: given.n if given.generator is not None else None)
    if inputs and all(len({given.generator for given in ranks}) == 1 for ranks in inputs.values()):
        passes = ", ".join(map(str, list(inputs)[:4]))
        seen = f"the generators are in the same state before forward passes {passes}"
        yield finding("same-randomness", "all ranks drop the same units", next(iter(inputs.values()))[0].at, seen)


def _augmentation(trace: Trace) -> Iterator[Finding]:
    """In the loading process itself."""
    for n, ranks in trace.by_key(Fetch, lambda fetch: fetch.n if fetch.drawn else None).items():
        for source in sorted(set.intersection(*(set(fetch.drawn) for fetch in ranks))):
            if len({fetch.drawn[source] for fetch in ranks}) == 1:
                seen = f"the data set draws from `{source}`, which is in the same state on all ranks at fetch {n}"
                what = "all ranks augment their samples with the same numbers"
                yield finding("same-randomness", what, trace.ranks[0].line(PassStart), seen)
                return


def _workers(trace: Trace) -> Iterator[Finding]:
    """Loader workers whose generators were in the same state when they first drew from them."""
    holders: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for rank in trace.ranks:
        for events in rank.workers:
            first = next((e for e in events if isinstance(e, Fetch) and e.drawn), Fetch(0))
            for source, state in first.drawn.items():
                holders[source, state].add((rank.number, first.worker or 0))
    for (source, _), workers in holders.items():
        if len(workers) > 1:
            names = ", ".join(f"worker {worker} of rank {rank}" for rank, worker in sorted(workers))
            seen = f"`{source}` starts in the same state in {names}"
            what = "loader workers draw the same random numbers"
            yield finding("same-workers", what, trace.ranks[0].line(PassStart), seen)
            return
