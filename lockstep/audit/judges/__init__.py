"""From what the ranks did to what is wrong with it."""

from collections.abc import Callable, Iterator

from ..catalog import Finding
from ..model import Trace
from . import collectives, epochs, files, precision, randomness, replicas, samples, settings, step

_ORDER = {"error": 0, "warning": 1, "note": 2}
Judge = Callable[[Trace], Iterator[Finding]]
_OF_RANKS: tuple[Judge, ...] = (
    replicas.judge, collectives.judge, step.judge, precision.judge, files.judge, settings.judge
)  # fmt: skip
_OF_SAMPLES: tuple[Judge, ...] = (samples.judge, epochs.judge, randomness.judge)
"""Whether ranks see and draw the same: ranks that share one layer must, and count as one."""
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
    """All findings, the worst first; one of each kind for each line of the script."""
    found: dict[tuple[str, object], Finding] = {}
    for judges, ranks in ((_OF_SAMPLES, trace.readers), (_OF_RANKS, trace)):
        for ask in judges:
            for finding in ask(ranks):
                found.setdefault((finding.kind.name, finding.at), finding)
    consequences = {name for cause, _ in found for name in CAUSES.get(cause, ())}
    kept = [f for f in found.values() if f.kind.name not in consequences]
    return sorted(kept, key=lambda f: (_ORDER[f.severity], f.kind.topic))
