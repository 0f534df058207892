"""One run under faults: started again until it is complete, then compared with the undisturbed run."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
from faults.inject import BIT_FLIP, DAMAGED, FILLER, FULL_DISK, IMMUTABLE, NAN, PLAN, Fault

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from multi.namespaces import ADDRESSES, Hosts, two_hosts  # noqa: E402
from processes import environment  # noqa: E402

RECIPES = Path(__file__).with_name("recipes.py")
DISK_MB = 24
DEADLINE = 200
"""Seconds after which a launch has not ended by itself: more than a launcher waits for its ranks."""
IN_USE = "is in use by process"
FOUND = {BIT_FLIP: "no longer hold the same tensors", NAN: "the gradient was not finite in 1 steps in a row"}
"""What a run must say about a fault that it must refuse."""
CUT_SHORT = "training is complete, and the model is kept"
"""What is said when a signal has ended the final evaluation or the last samples: the run is complete all the same."""
COMMON = ["--log_every", "5", "--save_every", "10", "--keep", "3", "--hang_timeout", "8", "--timeout", "20",
          "--max_bad_steps", "1", "--no_tensorboard", "--no_curves"]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What is trained, on two ranks."""

    name: str
    steps: int
    flags: tuple[str, ...]
    phases: tuple[str, ...] = ("start-up", "step", "checkpoint", "evaluation", "export")

    def words(self) -> list[str]:
        return [f"{RECIPES}:{self.name}", *COMMON, "--n_steps", str(self.steps), *self.flags]


CURVE = Recipe(
    "Curve", 60,
    ("--ema_decay", "0.9", "--schedule", "cosine", "--eval_every", "15", "--sample_every", "20", "--clip_grad", "1"),
    ("start-up", "step", "checkpoint", "evaluation", "sampling", "export"),
)  # fmt: skip
VISION = Recipe(
    "Vision", 40,
    ("--width", "4", "--img_size", "16", "--max_samples", "96", "--batch_size", "4", "--eval_every", "15",
     "--ema_decay", "0.9"),
)  # fmt: skip


@dataclass
class Result:
    """How a run went."""

    faults: list[Fault] = field(default_factory=list)
    """Those that happened."""
    launches: int = 0
    steps: int = 0
    """All steps that rank 0 has made."""
    useful: int = 0
    found: dict[str, int] = field(default_factory=dict)
    """By kind, how often a fault that must be refused was named."""
    seconds: float = 0.0
    failure: str = ""
    tracebacks: list[str] = field(default_factory=list)
    flipped: list[str] = field(default_factory=list)
    """Which tensors and bits."""


class Run:
    """A run in a small file system of its own."""

    def __init__(self, folder: Path, recipe: Recipe, extra: list[str], hosts: Hosts | None = None):
        self.folder, self.recipe, self.extra, self.hosts = folder, recipe, extra, hosts
        self.disk, self.plan = folder / "disk", folder / "disk/plan"
        self.out, self.logs = self.disk / "run", folder / "logs"
        for path in (self.logs, folder / "tmp"):
            path.mkdir(parents=True)
        self.result = Result()

    def complete(self, faults: list[Fault]) -> Result:
        """Cause the faults and start the run again and again until it is complete; return how it went."""
        started = time.monotonic()
        self.plan.mkdir(exist_ok=True)
        for number, fault in enumerate(faults):
            fault.write(self.plan / f"fault-{number}.json")
        for _ in range(3 * len(faults) + 3):
            before = self.happened(faults)
            text, status = self.launch()
            self.heal()
            new = [f for f in self.happened(faults) if f not in before]
            self.note(text, new, status)
            if status == 0 or self.result.failure:
                break
            faults[:] = [f if f not in new else self.damage(f) for f in faults]
        else:
            self.result.failure = "not complete after as many launches as there may be"
        self.result.faults = self.happened(faults)
        self.result.flipped = [path.read_text() for path in sorted(self.plan.glob("flipped-*"))]
        counted = self.plan / "steps-0"
        self.result.steps = counted.stat().st_size if counted.exists() else 0
        self.result.useful, self.result.seconds = self.recipe.steps, time.monotonic() - started
        return self.result

    def happened(self, faults: list[Fault]) -> list[Fault]:
        return faults[: sum(1 for _ in self.plan.glob("done-*"))]

    def launch(self) -> tuple[str, int]:
        """Start the run, as a user or a scheduler would; return its messages and exit status."""
        while True:
            self.result.launches += 1
            commands = [self._command(host) for host in range(2)] if self.hosts else [self._command()]
            stem = self.logs / f"{self.result.launches:02d}"
            files = [(stem.with_name(f"{stem.name}-{n}.out"), command) for n, command in enumerate(commands)]
            processes = [self._start(command, file) for file, command in files]
            deadline = time.monotonic() + DEADLINE
            for process in processes:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self.result.failure = f"did not end within {DEADLINE} s"
                    self.kill()
                    process.wait()
            text = "".join(file.read_text(errors="replace") for file, _ in files)
            if IN_USE not in text:
                return text, max(abs(process.returncode) for process in processes)
            time.sleep(0.5)  # ranks of a launch before are about to end

    def _command(self, host: int | None = None) -> list[str]:
        words = ["train", *self.recipe.words(), "--out", str(self.out), "--resume", "auto", *self.extra]
        if host is None:
            return ["lockstep", *words, "--nproc", "2"]
        assert self.hosts is not None
        where = [f"--node_rank={host}", f"--master_addr={ADDRESSES[0]}", "--master_port=29500"]
        return self.hosts.command(
            host, ["torchrun", "--nnodes=2", "--nproc_per_node=1", *where, "-m", "lockstep", *words]
        )

    def _start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        variables = {PLAN: str(self.plan), "LOCKSTEP_FAULT_CUT": self.link("down")}
        variables |= {"TMPDIR": str(self.folder / "tmp"), "XDG_STATE_HOME": str(self.folder / "state")}
        kept = {name: value for name, value in environment(**variables).items() if name != "LOCKSTEP_SMOKE"}
        with log.open("w") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=kept, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )  # fmt: skip

    def link(self, how: str) -> str:
        """Return the command that cuts the link between the two hosts, or connects them again."""
        return f"ip -n {self.hosts.names[1]} link set {self.hosts.interfaces[1]} {how}" if self.hosts else "false"

    def heal(self) -> None:
        """Undo what a fault did to the machine."""
        (self.disk / FILLER).unlink(missing_ok=True)
        folders = [str(path) for path in (self.out, *self.out.glob("*/")) if path.is_dir()]
        if folders:
            subprocess.run(["chattr", "-i", *folders], check=False, capture_output=True)
        if self.hosts:
            subprocess.run(self.link("up").split(), check=True)

    def note(self, text: str, new: list[Fault], status: int) -> None:
        """Keep tracebacks of this launch; a launch that fails without a fault is a failure of the run."""
        if "Traceback" in text:
            self.result.tracebacks.append(
                f"{[f'{f.kind} {f.target} {f.phase}' for f in new]}: {text[text.index('Traceback') :][:1500]}"
            )
        if status and not new and not self.result.failure:
            self.result.failure = f"ended with status {status} without a fault: {text[-1500:]}"

    def damage(self, fault: Fault) -> Fault:
        """Damage or delete the newest checkpoint, if that is the fault; without one before it, it was but a SIGKILL."""
        found = sorted(self.out.glob("checkpoints/step-*"))
        if fault.kind != DAMAGED:
            return fault
        if len(found) < 2 or self.alive():
            return replace(fault, kind="SIGKILL")
        draw = random.Random(fault.choice)
        file = draw.choice(sorted(found[-1].iterdir()))
        how = draw.choice(["delete", "delete file", "truncate", "flip", "empty"])
        if how == "delete":
            shutil.rmtree(found[-1])
        elif how == "delete file":
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            place = draw.randrange(len(data))
            data[place] ^= 1 << draw.randrange(8)
            file.write_bytes(data if how == "flip" else data[:place] if how == "truncate" else b"")
        return replace(fault, target=how)

    def said(self) -> str:
        """Return the output of all launches, which goes on a little after a launcher was killed."""
        logs = sorted(self.logs.iterdir())
        return " ".join(word for log in logs for word in log.read_text(errors="replace").split())

    def compare(self, reference: dict[str, Any]) -> str:
        """Return what differs from the undisturbed run; logs and samples may be missing where the disk failed."""
        said = self.said()
        self.result.found = {kind: said.count(words) for kind, words in FOUND.items()}
        try:
            wrong = differences(reference, content(self.out, self.recipe.steps))
        except (OSError, ValueError, KeyError) as error:
            return f"the end cannot be read: {type(error).__name__}: {error}"
        cut_short = CUT_SHORT in said
        may_differ = ["evaluation"] * cut_short
        if cut_short or any(fault.kind in (FULL_DISK, IMMUTABLE) for fault in self.result.faults):
            may_differ += ["logged", "samples"]
        wrong = [name for name in wrong if name not in may_differ]
        return f"{len(wrong)} differences from the undisturbed run, first {wrong[0]}" if wrong else ""

    def alive(self) -> list[psutil.Process]:
        """Return the processes of this run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.folder):
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()

    def left_behind(self) -> list[str]:
        """Return what is still there after the end of the run; loader processes notice the end of a rank within 5 s."""
        deadline = time.monotonic() + 12
        while (processes := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        hidden = [str(path.relative_to(self.out)) for path in self.out.rglob(".*")]
        temporary = [f"tmp/{path.name}" for path in (self.folder / "tmp").glob("lockstep-*")]
        shared = [f"{path}" for pid in self._pids() for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
        return [*(" ".join(p.cmdline())[:80] for p in processes), *hidden, *temporary, *shared]

    def left_behind_at_last(self) -> list[str]:
        """Return the same; what could not be removed from an immutable folder is removed by the next launch."""
        left = self.left_behind()
        if left and any(fault.kind == IMMUTABLE for fault in self.result.faults):
            for fault in self.plan.glob("fault-*"):
                fault.unlink()
            self.launch()
            left = self.left_behind()
        return left

    def _pids(self) -> list[str]:
        return [path.read_text() for path in self.plan.glob("pid-*")]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of a few megabytes at folder/disk, which is gone afterwards; only root can mount one."""
    (folder / "disk").mkdir(parents=True)
    mounted = os.geteuid() == 0
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(folder / "disk")], check=True)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder / "disk")], check=True)
        shutil.rmtree(folder)


def content(out: Path, steps: int) -> dict[str, Any]:
    """Return what must be equal at the end: the last checkpoint, the exported weights, logged steps and samples."""
    last = out / "checkpoints" / f"step-{steps:08d}"
    state = json.loads((last / "state.json").read_text())
    found: dict[str, Any] = {
        "state": state,
        "evaluation": [state["progress"].pop(n) for n in ("best", "bad_evaluations")],
    }
    for file in itertools.chain(last.glob("*.safetensors"), out.glob("model*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            found[f"{file.name}/{name}"] = tensor
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found["logged"] = [line["step"] for line in lines if "loss" in line]
    found["samples"] = {file.name: file.read_text() for file in sorted((out / "samples").glob("*"))}
    for file in out.glob("model*.pth"):
        found |= {f"{file.name}/{name}": tensor for name, tensor in torch.load(file, weights_only=True).items()}
    return found


def differences(reference: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = {*reference, *found}
    return sorted(name for name in names if not _equal(reference.get(name), found.get(name)))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bytes(a), _bytes(b))
    return type(a) is type(b) and json.dumps(a) == json.dumps(b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def undisturbed(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Train without faults, and return the end."""
    with small_disk(folder):
        run = Run(folder, recipe, [])
        result = run.complete([])
        left = run.left_behind()
        assert not result.failure and not left, f"{result.failure or left}"
        return content(run.out, recipe.steps)


def disturbed(
    folder: Path, recipe: Recipe, extra: list[str], faults: list[Fault], reference: dict[str, Any], two_nodes: bool
) -> Result:
    """Train under faults; the result says what was wrong at the end, if anything was."""
    with ExitStack() as stack:
        stack.enter_context(small_disk(folder))
        run = Run(folder, recipe, extra, stack.enter_context(two_hosts()) if two_nodes else None)
        result = run.complete(faults)
        if not result.failure:
            result.failure = run.compare(reference)
        if not result.failure and (left := run.left_behind_at_last()):
            result.failure = f"left behind: {', '.join(left)}"
        if result.failure:
            kept = Path(os.environ.get("LOCKSTEP_FAULT_LOGS", "/tmp")) / f"chaos-failed-{folder.name}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(run.logs, kept)
            shutil.copytree(run.out, kept / "run", symlinks=True)
            result.failure += f" (logs in {kept})"
        run.kill()
        return result
