"""How long this rank has made no progress, and how long its phase may take."""

from collections.abc import Callable
from contextlib import suppress

from .. import activity
from ..activity import Activity
from .stacks import is_compiling

FACTORS: dict[str, float | None] = {
    activity.START_UP: None,  # data is found, downloaded, decoded: nobody knows how long that takes
    activity.FIRST_STEP: 3,
    activity.STEP: 1,
    activity.LOGGING: 1,
    activity.EVALUATION: 5,
    activity.SAMPLING: 5,
    activity.SAVING: None,  # a slow disk must not cost the checkpoint
    activity.CLOSING: None,
}
"""The limit of each phase, in multiples of --hang_timeout; None: no limit, as long as no other rank waits."""
BUSY = 0.1
"""How fast time without progress is counted while this rank is seen to compute."""
LONGEST = 3
"""A phase may take this many times the longest time without progress that it has had before."""


class IdleClock:
    """Seconds without progress. Time in which the process was stopped or the machine asleep does not count."""

    def __init__(self, activity: Activity, hang_timeout: float, busy: Callable[[float], bool] = lambda _: False):
        """`busy(seconds)`: whether this rank has computed for most of them, which in a script leaves no mark."""
        self.activity, self.hang_timeout, self.busy = activity, hang_timeout, busy
        self.idle = 0.0
        self._marks, self._phase = activity.marks, activity.phase
        self._longest: dict[str, float] = {}

    def tick(self, elapsed: float) -> None:
        """Look for progress; `elapsed`: seconds since the last look."""
        if self.activity.marks != self._marks or self._device_has_finished_steps():
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self.idle)
            self.idle = 0.0
        elif is_compiling():
            self.idle = 0.0
        else:
            self.idle += elapsed * (BUSY if self.busy(elapsed) else 1)
        self._marks, self._phase = self.activity.marks, self.activity.phase

    def _device_has_finished_steps(self) -> bool:
        """Return whether the GPU has finished a step since the last look, while the host waits for it to log."""
        events, progress = self.activity.device_steps, False
        with suppress(IndexError):  # the main thread clears them when it has logged
            while self.activity.phase == activity.LOGGING and events[0].query():
                progress = True
                events.popleft()
        return progress

    def limit(self, waits: bool) -> float | None:
        """Return how long this rank may be idle; None: as long as no other rank waits for it."""
        if waits:
            return self.hang_timeout  # whether it is to blame depends on the others
        factor = FACTORS[self._phase]
        return None if factor is None else max(factor * self.hang_timeout, LONGEST * self._longest.get(self._phase, 0))
