"""One contender, or the ceiling, in a process of its own: python -m lockstep.bench.worker TASK.json RESULT.json"""

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import registry
from ..flags import Request, parse

CEILING = "ceiling"


@dataclass
class Task:
    """What a process of its own is to measure."""

    recipe: str
    flags: list[str]
    contender: str
    """A name of `CONTENDERS`, or `CEILING`."""
    warmup: int
    steps: int
    started: float
    """The time at which the process was started."""
    folder: str
    """For what a run leaves behind."""

    def request(self) -> Request:
        return request_for(self.recipe, [*self.flags, "--out", self.folder, "--no_tensorboard"])


def request_for(recipe: str, flags: Sequence[str]) -> Request:
    """Return the settings of a run whose global batch is one micro-batch."""
    found = registry.find(recipe)
    tile = parse(found, flags, "lockstep bench").train.data.batch_size
    return parse(found, [*flags, "--global_batch_size", str(tile)], "lockstep bench")


def main(task: Task) -> dict[str, float | None]:
    from ..distributed import pick_device
    from .ceiling import measure
    from .clock import Clock
    from .contenders import CONTENDERS
    from .workloads import Work

    request = task.request()
    if task.contender == CEILING:
        return {**measure(Work(request))}
    clock = Clock(pick_device(request.train.hardware.device, 0), task.warmup, task.steps, task.started)
    with clock.watching_loaders():
        CONTENDERS[task.contender].train(request, clock)
    return asdict(clock.timing())


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    result = main(Task(**json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(result))
