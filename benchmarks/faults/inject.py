"""Runs in the ranks of a run under test: waits for the moment of the next planned fault, and causes it.

The plan is a folder: fault-0.json, fault-1.json, ...; done-N marks a fault that was caused. Faults are caused in their
order, also by ranks that an agent has restarted. `install` patches functions of the package, one list for each phase.
"""

import functools
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint, rundir, state, trainer
from lockstep.evaluate import Evaluator
from lockstep.sampling import Sampler
from lockstep.trainer import Trainer

PLAN = "LOCKSTEP_FAULT_PLAN"
"""The variable with the folder of the plan."""
SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGSTOP")
FULL_DISK, IMMUTABLE, NAN, BIT_FLIP = "full disk", "immutable folder", "NaN batch", "bit flip"
CUT_LINK, DAMAGED = "cut link", "damaged checkpoint"
FILLER = "filler"
HOOKS: dict[str, list[tuple[Any, str]]] = {
    "start-up": [(rundir, "resolve_run_dir"), (trainer, "prepare"), (Trainer, "_open_trackers")],
    "checkpoint": [
        (checkpoint, "_fill"), (checkpoint, "flush"), (checkpoint, "_swap"), (checkpoint.Checkpoints, "_delete_old"),
    ],
    "evaluation": [(Evaluator, "_batch")],
    "sampling": [(Sampler, "_sample_set"), (Sampler, "_write")],
    "export": [(state, "export")],
}  # fmt: skip
"""By phase, what is patched: a fault comes before a call. Steps have a hook of their own."""


@dataclass(frozen=True)
class Fault:
    """What happens, to which process, and when."""

    kind: str
    target: str
    """`rank 0`, `rank 1`, `launcher`, `worker` or, of other faults than signals, what they change."""
    phase: str
    rank: int
    """The rank that causes it."""
    call: int
    """The number of the call in this phase, from 1, since the process started or the fault before was caused."""
    delay: float
    """Seconds after the call began."""
    seconds: float
    """How long it lasts; 0: until somebody clears it."""
    choice: int
    """A random number: which tensor, which bit, which damage."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Fault":
        return cls(**json.loads(path.read_text()))


class Injector:
    """The faults of one rank."""

    def __init__(self, plan: Path, rank: int):
        self.plan, self.rank = plan, rank
        self.number, self.calls = -1, 0
        self.steps = os.open(plan / f"steps-{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.nan_pending = False
        (plan / f"pid-{rank}").write_text(str(os.getpid()))

    def pending(self) -> Fault | None:
        """Return the next fault of the plan, if there is one left."""
        number = sum(1 for _ in self.plan.glob("done-*"))
        if number != self.number:
            self.number, self.calls = number, 0
        with suppress(FileNotFoundError):
            return Fault.read(self.plan / f"fault-{number}.json")
        return None

    def reached(self, phase: str) -> Fault | None:
        """Return the fault whose moment is now, if this rank causes it; it is marked as done before it happens."""
        fault = self.pending()
        if fault is None or (fault.phase, fault.rank) != (phase, self.rank):
            return None
        self.calls += 1
        if self.calls < fault.call or (fault.kind in SIGNALS and self._target(fault) is None):
            return None
        try:
            os.close(os.open(self.plan / f"done-{self.number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        return fault

    def before(self, phase: str) -> None:
        """Cause the fault of this moment, at once or after its delay."""
        if fault := self.reached(phase):
            self.start(fault)

    def start(self, fault: Fault) -> None:
        if fault.delay:
            threading.Timer(fault.delay, self.cause, [fault]).start()
        else:
            self.cause(fault)

    def cause(self, fault: Fault) -> None:
        if fault.kind == NAN:
            self.nan_pending = True
        elif fault.kind == CUT_LINK:
            subprocess.run(["sh", "-c", os.environ["LOCKSTEP_FAULT_CUT"]], check=True)
        elif fault.kind in (FULL_DISK, IMMUTABLE):
            _spoil_disk(fault, self.plan.parent)
        else:
            self._send(signal.SIGKILL if fault.kind == DAMAGED else signal.Signals[fault.kind], fault)

    def _send(self, number: signal.Signals, fault: Fault) -> None:
        pid = self._target(fault)
        if pid is None:  # it has ended during the delay
            return
        if number == signal.SIGSTOP and fault.seconds:
            _later(fault.seconds, f"kill -CONT {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _target(self, fault: Fault) -> int | None:
        """Return the process that a signal goes to; None if it has ended: its number may be another's by now."""
        if fault.target == "worker":
            found = self._workers()
        elif fault.target == "launcher":
            found = [os.getppid()]
        else:
            rank = 0 if fault.kind == DAMAGED else int(fault.target[-1])
            found = [int((self.plan / f"pid-{rank}").read_text())]
        return next((pid for pid in found if self._is_of_this_run(pid)), None)

    def _is_of_this_run(self, pid: int) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cwd").readlink() == Path.cwd()
        return False

    def _workers(self) -> list[int]:
        """Return the loader's processes of this rank."""
        tasks = Path("/proc/self/task").glob("*/children")
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
        return [pid for pid in children if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def step(self, original: Callable[[Trainer], None], running: Trainer) -> None:
        """Make a step with its faults, and count it."""
        fault = self.reached("step")
        if fault and fault.kind != BIT_FLIP:
            self.start(fault)
        original(running)
        os.write(self.steps, b".")
        if fault and fault.kind == BIT_FLIP:
            flipped = flip(running, fault.choice)
            with suppress(OSError):  # the disk may be full
                (self.plan / f"flipped-{self.number}").write_text(flipped)


def flip(running: Trainer, choice: int) -> str:
    """Flip one bit of the weights, the buffers, the averages or the optimizer state of this rank; return which."""
    draw = random.Random(choice)
    tensors = running.state.replicated(set(), True)
    name = draw.choice([name for name, tensor in tensors.items() if tensor.dtype.itemsize == 4 and tensor.numel()])
    words = tensors[name].detach().view(-1).view(torch.int32)
    bit = draw.randrange(31)
    words[draw.randrange(len(words))] ^= 1 << bit
    return f"{name}, bit {bit}"


def _spoil_disk(fault: Fault, disk: Path) -> None:
    if fault.kind == FULL_DISK:
        clear = f"rm -f {disk / FILLER}"
        with suppress(OSError), (disk / FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    else:
        (disk / "run").mkdir(exist_ok=True)
        folders = [str(folder) for folder in (disk / "run", *(disk / "run").glob("*/"))]
        clear = f"chattr -i {' '.join(folders)}"
        subprocess.run(["chattr", "+i", *folders], check=True)
    if fault.seconds:
        _later(fault.seconds, clear)


def _later(seconds: float, command: str) -> None:
    """Run a command when this process may be stopped or dead."""
    words = ["sh", "-c", f"sleep {seconds}; {command}"]
    subprocess.Popen(words, start_new_session=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def install() -> Injector | None:
    """Patch the package in a rank of a run with a plan."""
    if PLAN not in os.environ or "RANK" not in os.environ:
        return None
    injector = Injector(Path(os.environ[PLAN]), int(os.environ["RANK"]))
    for phase, functions in HOOKS.items():
        for owner, name in functions:
            setattr(owner, name, _hooked(getattr(owner, name), functools.partial(injector.before, phase)))
    step = Trainer.train_step
    Trainer.train_step = lambda self: injector.step(step, self)  # type: ignore[method-assign]
    injector.before("start-up")
    return injector


def _hooked(original: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        before()
        return original(*arguments, **named)

    return call
