"""From the state of every rank to a sentence: which rank is stuck, and where the others wait for it."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from .. import activity
from .stacks import Line, own_line, waits_in

Kind = Literal["silent", "data", "collective", "device", "running"]
_STEPS = (activity.FIRST_STEP, activity.STEP)


@dataclass
class RankState:
    """What one rank has last published."""

    rank: int
    beat: int = 0
    """Rises with every message: a rank whose beat stands still does not respond."""
    idle: float = 0.0
    """Seconds without progress."""
    limit: float | None = None
    """Seconds without progress that its phase allows; None: any number, as long as no other rank waits for it."""
    waits: bool = False
    """Whether its training thread is in a collective."""
    done: bool = False
    phase: str = activity.START_UP
    step: int = 0
    loads_data: bool = False
    on_gpu: bool = False
    process: dict[str, Any] = field(default_factory=dict)
    """Host, process id and start time; see `processes.this_process`."""
    data_seconds: float = 0.0
    """Time spent so far in waiting for the loader."""
    memory: int = 0
    memory_total: int = 0
    utilization: int | None = None
    """Of its device; see `live.DeviceLoad`."""
    stack: list[Line] = field(default_factory=list)
    """Of its training thread; these and the rest are published only when a hang is reported."""
    threads: str = ""
    unfinished: str = ""
    """The collective that its GPU has not finished, where NCCL's flight recorder knows it."""
    silent: str = ""
    """Why it does not respond; filled in by the rank that reports."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RankState":
        state = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        state.stack = [Line(*line) for line in state.stack]
        return state

    @property
    def kind(self) -> Kind:
        if self.silent:
            return "silent"
        if self.loads_data:
            return "data"
        if waits_in(self.stack):
            return "collective"
        return "device" if self.on_gpu and self.phase == activity.LOGGING else "running"

    def what(self) -> str:
        """Return what the rank does, as the end of a sentence that begins with its number."""
        line = own_line(self.stack) if self.stack else "an unknown line"
        if self.silent:
            return self.silent
        if self.loads_data:
            return f"waits for data in {self.when()} at {line}"
        if found := waits_in(self.stack):
            name, at = found
            doing = "is in backward (DDP sums the gradients there)" if name == "backward" else f"waits in {name}"
            return f"{doing} at {at.site}"
        if self.kind == "device":
            return f"waits for its GPU, which has not finished {self.unfinished or 'its work'}, at {line}"
        return f"is stuck in {self.when()} at {line}"

    def when(self) -> str:
        if self.phase in _STEPS:
            return f"step {self.step + 1}"
        return f"{self.phase} after step {self.step}" if self.step else self.phase


def diagnose(states: list[RankState]) -> list[str]:
    """Return a line for each group of ranks that do the same; those that are stuck come before those that wait."""
    stuck = [state for state in states if state.kind not in ("collective", "device")]
    waiting = [state for state in states if state not in stuck]
    if stuck or len(states) == 1:
        return [*_grouped(stuck), *_grouped(waiting)]
    if len({waits_in(state.stack) for state in waiting}) > 1:
        return ["the ranks wait in different collectives:", *_grouped(waiting)]
    if all(state.kind == "device" for state in waiting):
        return ["every rank waits for its GPU; did the ranks call different collectives?", *_grouped(waiting)]
    return ["every rank is in the same collective, and nothing arrives (network?):", *_grouped(waiting)]


def _grouped(states: list[RankState]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for state in states:
        alike.setdefault(state.what(), []).append(state.rank)
    return [f"rank {', '.join(map(str, ranks))} {what}" for what, ranks in alike.items()]


def report(states: list[RankState]) -> str:
    """Return the part of `hang.txt` with every rank's state and stacks."""
    parts = []
    for state in states:
        process = f"process {state.process.get('pid')} on {state.process.get('host')}"
        head = f"rank {state.rank}: {state.when()}, no progress for {state.idle:.1f} s, {process}"
        parts.append("\n".join(filter(None, (head, state.silent, state.unfinished, state.threads.rstrip()))))
    return "\n\n".join(parts) + "\n"
