"""The verdict of an audit: what was found, and the one sentence for terminal, JSON and page."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .catalog import Finding
from .events import PassEnd
from .ignores import Ignored
from .model import Trace

SEVERITIES = ("error", "warning", "note")
"""The worst first."""
FailOn = Literal["error", "warning", "note", "never"]


@dataclass(frozen=True)
class Verdict:
    """What an audit found."""

    script: list[str]
    trace: Trace
    findings: list[Finding]
    notes: list[str]
    """Where what was watched differs from what the script would do elsewhere, and what was not watched."""

    ignored: list[Ignored] = field(default_factory=list)
    fail_on: FailOn = "error"
    """Findings from which on the script fails the audit."""
    command: str = ""
    """With which the audit was started; empty: by a program."""

    @property
    def status(self) -> int:
        """The exit status. A script that crashed or hangs fails whatever is ignored: most of it was not watched."""
        failing = () if self.fail_on == "never" else SEVERITIES[: SEVERITIES.index(self.fail_on) + 1]
        broken = self.trace.hung or any(rank.failed for rank in self.trace.ranks)
        return int(broken or any(f.severity in failing for f in self.findings))

    @property
    def consequence(self) -> str:
        """What follows from the findings for the exit status, in words; empty if there are none."""
        if not self.findings:
            return ""
        if self.status == 0:
            least = "whatever is found" if self.fail_on == "never" else f"no {self.fail_on}"
            least += "" if self.fail_on in ("never", "error") else " or worse"
            return f"passes: {least} (--fail-on {self.fail_on})"
        return f"fails (--fail-on {self.fail_on})"

    @property
    def sentence(self) -> str:
        counts = [len(rank.steps) for rank in self.trace.ranks]
        least, most = min(counts, default=0), max(counts, default=0)
        steps = counted(most, "step") if least == most else f"{least} to {most} steps"
        severities = Counter(finding.severity for finding in self.findings)  # the worst first, as the findings are
        found = ", ".join(counted(n, severity) for severity, n in severities.items())
        result = found + self._ending(most) if found else f"nothing found{self._reservation(counts)}"
        result += f"; {len(self.ignored)} ignored" if self.ignored else ""
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
