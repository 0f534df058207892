"""The verdict of an audit: what was found, and the one sentence for terminal, JSON and page."""

from collections import Counter
from dataclasses import dataclass

from .catalog import Finding
from .events import PassEnd
from .model import Trace


@dataclass(frozen=True)
class Verdict:
    """What an audit found."""

    script: list[str]
    trace: Trace
    findings: list[Finding]
    notes: list[str]
    """Where what was watched differs from what the script would do elsewhere, and what was not watched."""

    @property
    def status(self) -> int:
        return int(any(f.severity == "error" for f in self.findings))

    @property
    def sentence(self) -> str:
        counts = [len(rank.steps) for rank in self.trace.ranks]
        least, most = min(counts, default=0), max(counts, default=0)
        steps = counted(most, "step") if least == most else f"{least} to {most} steps"
        severities = Counter(finding.severity for finding in self.findings)  # the worst first, as the findings are
        found = ", ".join(counted(n, severity) for severity, n in severities.items())
        result = found + self._ending(most) if found else f"nothing found{self._reservation(counts)}"
        return f"{result} ({counted(self.trace.world, 'rank')}, {steps})"

    def _ending(self, steps: int) -> str:
        if self.trace.hung:
            return "; the ranks hang"
        if any(rank.failed for rank in self.trace.ranks):
            return "; the script failed" + ("" if steps else " before its first step")
        return ""

    def _reservation(self, counts: list[int]) -> str:
        """What limits "nothing found", or else what follows from it."""
        if failed := self.trace.failed_probes:
            return f", but {counted(len(failed), 'probe')} failed, see the notes"
        if not all(counts):
            idle = [rank.number for rank in self.trace.ranks if not rank.steps]
            where = "" if not any(counts) else f" on rank {', '.join(map(str, idle))}"
            return f", but no step was watched{where}"
        if self.trace.world == 1:
            return ""
        whole_pass = any(rank.first(PassEnd) for rank in self.trace.ranks)
        return f": the ranks train one model{' on all of the data' if whole_pass else ''}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
