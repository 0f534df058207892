"""What is measured between two steps: time, waits for data, time in which a GPU has nothing to do, memory."""

import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import dataloader

PROFILED = 5
"""Steps that are made once more under the profiler, to see when the GPU has nothing to do."""


@dataclass
class Timing:
    """Seconds of one step, and of what is lost in it."""

    step: float
    first_step: float
    """From the start of the process to the end of its first step."""
    data_wait: float
    """In which the host waited for a batch."""
    device_idle: float | None
    """In which the GPU had nothing to do, since the host came too late; None without a GPU."""
    memory: int
    """Bytes: the most that torch has allocated on the GPU; without a GPU, the most memory of the process."""


class Clock:
    """Counts steps: `tick` after each, which returns whether all have been made."""

    def __init__(self, device: torch.device, warmup: int, steps: int, started: float):
        self.device, self.warmup, self.steps, self.started = device, warmup, steps, started
        self.count, self.first_step, self.step = 0, 0.0, 0.0
        self.data_wait, self.device_idle = 0.0, None if device.type == "cpu" else 0.0
        self._waited, self._began = 0.0, 0.0
        self._profiler: Any = None

    @property
    def total(self) -> int:
        return self.warmup + self.steps + (PROFILED if self.device_idle is not None else 0)

    @contextmanager
    def watching_loaders(self) -> Iterator[None]:
        """Count the time that any DataLoader keeps the host waiting."""
        plain = dataloader._BaseDataLoaderIter.__next__

        def timed(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(iterator)
            finally:
                self._waited += time.perf_counter() - began

        dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dataloader._BaseDataLoaderIter.__next__ = plain  # type: ignore[method-assign]

    def tick(self) -> bool:
        self.count += 1
        if self.count == 1:
            self._synchronize()
            self.first_step = time.time() - self.started
        if self.count == self.warmup:
            self._synchronize()
            self._waited, self._began = 0.0, time.perf_counter()
        if self.count == self.warmup + self.steps:
            self._synchronize()
            self.step = (time.perf_counter() - self._began) / self.steps
            self.data_wait = self._waited / self.steps
            self._start_profiler()
        if self.count == self.total and self._profiler is not None:
            self._read_profiler()
        return self.count >= self.total

    def timing(self) -> Timing:
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Timing(self.step, self.first_step, self.data_wait, self.device_idle, memory)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start_profiler(self) -> None:
        if self.device_idle is not None:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def _read_profiler(self) -> None:
        self._synchronize()
        self._profiler.stop()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        self.device_idle = max(0.0, self.step - covered(spans) / 1e6 / PROFILED)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans: kernels of several streams run at one time."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
