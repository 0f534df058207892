"""From what the ranks did to what is wrong with it."""

from collections.abc import Callable, Iterator

from ..catalog import Finding
from ..trace import Trace
from . import collectives, epochs, files, precision, randomness, replicas, samples, settings, step

_ORDER = {"error": 0, "warning": 1, "note": 2}
Judge = Callable[[Trace], Iterator[Finding]]
JUDGES: tuple[Judge, ...] = (
    replicas.judge,
    collectives.judge,
    samples.judge,
    epochs.judge,
    randomness.judge,
    step.judge,
    precision.judge,
    files.judge,
    settings.judge,
)
_OF_SAMPLES = (samples.judge, epochs.judge, randomness.judge)
"""Whether ranks see and draw something else than others."""
CAUSES = {
    # where the first is found, the second only follows from it
    "differing-schedule": {"unsynchronised", "local-metric"},
    "uneven-steps": {"collective-mismatch", "hangs", "crashed", "repeated-samples", "unseen-samples"},
    "collective-mismatch": {"hangs", "crashed"},
    "differing-epoch": {"repeated-samples", "unseen-samples"},
    "differing-splits": {"padded-evaluation", "overlapping-splits", "repeated-samples", "unseen-samples"},
    "foreign-parameters": {"nothing-changed", "no-gradient", "untrained-parameters", "unsynchronised"},
    "nothing-left-to-train": {"no-steps"},
    "repeated-samples": {"unseen-samples", "unsharded-stream"},
    "several-writers": {"in-place-checkpoint"},
    "no-zero-grad": {"leaking-accumulation"},
    "same-workers": {"same-randomness"},
}


def judge(trace: Trace) -> list[Finding]:
    """All findings, the worst first; one of each kind for each place in the script."""
    found: dict[tuple[str, object], Finding] = {}
    readers = trace.readers
    for ask in JUDGES:
        for finding in ask(readers if ask in _OF_SAMPLES else trace):
            found.setdefault((finding.kind.name, finding.at), finding)
    follows = {name for cause, _ in found for name in CAUSES.get(cause, ())}
    kept = [f for f in found.values() if f.kind.name not in follows]
    return sorted(kept, key=lambda f: (_ORDER[f.severity], f.kind.topic))
