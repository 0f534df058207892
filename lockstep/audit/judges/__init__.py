"""From what the ranks did to what is wrong with it."""

from ..catalog import CONSEQUENCES, Finding
from ..model import Trace
from . import (
    averages,
    collectives,
    evaluation,
    files,
    precision,
    randomness,
    replicas,
    samples,
    schedules,
    settings,
    step,
)  # fmt: skip

_ORDER = {"error": 0, "warning": 1, "note": 2}
_OF_RANKS = (replicas, schedules, averages, collectives, step, evaluation, precision, files, settings)
_OF_SAMPLES = (samples, randomness)
"""Whether ranks see and draw the same: ranks that share one layer must, and count as one."""


def judge(trace: Trace) -> list[Finding]:
    """All findings, the worst first; one of each kind for each line of the script."""
    found: dict[tuple[str, object], Finding] = {}
    for judges, ranks in ((_OF_SAMPLES, trace.readers), (_OF_RANKS, trace)):
        for subject in judges:
            for finding in subject.judge(ranks):
                found.setdefault((finding.kind.name, finding.at), finding)
    consequences = {name for cause, _ in found for name in CONSEQUENCES[cause]}
    kept = [f for f in found.values() if f.kind.name not in consequences]
    return sorted(kept, key=lambda f: (_ORDER[f.severity], f.kind.topic))
