"""The history of an exact run: digests of weights and gradients, step by step, in history.jsonl of the run's folder.

    {"step": 20, "samples": [532, 560], "tiles": 7, "lr": 0.01, "loss": 0.53, "skipped_steps": 0, "redone_steps": 1,
     "gradient": "64f1...", "weights": "07ab...", "chain": "c19e..."}

Each line's `chain` is a hash of the line and of the chain before it, so one value vouches for all steps up to there.
Nothing in a line depends on the number of ranks. Digests are made on the device, on rank 0, and read when values are
logged: no step waits for them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..batching import Batching
from ..distributed import World
from ..files import StepLines, flush
from .drift import PendingChecksums, checksums, start_checksums

FILE = "history.jsonl"
FIRST_CHAIN = "0" * 32
"""What the first line is chained to."""
ONLY = "; only the lines before it count"


@dataclass(frozen=True)
class StepNumbers:
    """What is known of a step on the host, and its losses on the device."""

    lr: float
    tiles: int
    losses: Tensor
    """(micro-batches of this rank, 2): sum and weight of each."""
    skipped_steps: Tensor


@dataclass(frozen=True)
class _Recorded:
    step: int
    numbers: StepNumbers
    redone_steps: int
    gradient: PendingChecksums | None
    weights: PendingChecksums | None


@dataclass(frozen=True)
class Digested:
    """A line of the history, and the checksums behind its digests, by name of the tensor."""

    line: dict[str, Any]
    gradient: dict[str, int]
    weights: dict[str, int]


class History:
    """Collects the digests of steps, and writes them out. Every rank calls it, rank 0 has the digests and the file."""

    def __init__(self, world: World, folder: Path, model: nn.Module, every: int, batching: Batching):
        self.world, self.path, self.model = world, folder / FILE, model
        self.every, self.batching = every, batching
        self.step, self.chain = 0, FIRST_CHAIN
        """Of the last line."""
        self.redone_steps = 0
        self._gradient: PendingChecksums | None = None
        self._weights: PendingChecksums | None = None
        self._recorded: list[_Recorded] = []
        self._lines: StepLines | None = None
        self._failure, self._reported = "", False

    def open(self, step: int, tiles: int) -> None:
        """Begin the file, or go on with it after `step`, from which the run resumes."""
        if not self.world.is_main:
            return
        self._lines = StepLines(self.path, last=step if step else -1)
        if step == 0:
            self._append({"step": 0, "tiles": tiles, "weights": self.weights_digest()})
        elif self.chain == FIRST_CHAIN:  # the steps before were made without a history, or with --history_every 0
            self.step, self.chain = _last_link(self.path.parent)

    def digest_gradients(self, step: int) -> None:
        """Start a digest of the summed gradients, before the update that makes the weights of `step` from them."""
        self._gradient = self._start(step, lambda: gradients(self.model))

    def digest_weights(self, step: int) -> None:
        """Start a digest of the weights after `step`."""
        self._weights = self._start(step, self.model.state_dict)

    def _start(self, step: int, tensors: Callable[[], dict[str, Tensor]]) -> PendingChecksums | None:
        return start_checksums(tensors()) if self.is_due(step) and self.world.is_main else None

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def add(self, step: int, numbers: StepNumbers) -> None:
        """Record a step that is due and counts: the digests started last are its own."""
        self._recorded.append(_Recorded(step, numbers, self.redone_steps, self._gradient, self._weights))

    def write(self) -> list[Digested]:
        """Write the lines of the steps recorded so far, and return them on rank 0; waits for the device.

        Every rank calls this.
        """
        recorded, self._recorded = self._recorded, []
        ranks = self.world.gather([one.numbers.losses.tolist() for one in recorded]) if recorded else []
        written = []
        for number, one in enumerate(recorded if self.world.is_main else []):
            assert one.gradient is not None and one.weights is not None
            gradient, weights = one.gradient.read(), one.weights.read()
            line = {
                "step": one.step,
                "samples": self.batching.positions(one.step - 1),
                "tiles": one.numbers.tiles,
                "lr": one.numbers.lr,
                "loss": _mean([pair for rank in ranks for pair in rank[number]]),
                "skipped_steps": int(one.numbers.skipped_steps),
                "redone_steps": one.redone_steps,
                "gradient": combine(gradient),
                "weights": combine(weights),
            }
            self._append(line)
            written.append(Digested(line, gradient, weights))
        return written

    def _append(self, line: dict[str, Any]) -> None:
        self.step, self.chain = line["step"], chained(self.chain, line)
        if self._lines is not None:
            try:
                self._lines.append({**line, "chain": self.chain})
            except OSError as error:  # a full disk is no reason to stop: the line is kept
                self._failure = str(error)

    def failure(self) -> str | None:
        """Return why lines could not be written, the first time that it happens."""
        if not self._failure or self._reported:
            return None
        self._reported = True
        return f"{self.path.name} cannot be written, and is tried again: {self._failure}"

    def flush(self) -> None:
        """Write all lines to the disk: a checkpoint that holds their chain is written next."""
        if self._lines is not None:
            with suppress(OSError):
                flush(self.path)

    def summary(self, step: int) -> str:
        """Return what the run says at its end: the digest of its weights, and the chain that led there."""
        return f"weights after step {step}: {self.weights_digest()}; chain up to step {self.step}: {self.chain}"

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def weights_digest(self) -> str:
        """Return the digest of the weights as they are now; waits for the device."""
        return combine(checksums(self.model.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "chain": self.chain,
            "redone_steps": self.redone_steps,
            "weights": self.weights_digest() if self.world.is_main else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.chain, self.redone_steps = state["step"], state["chain"], state["redone_steps"]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that a model's parameters have, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def combine(sums: Mapping[str, int]) -> str:
    """Return one digest of named checksums."""
    text = json.dumps(list(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def chained(before: str, line: Mapping[str, Any]) -> str:
    """Return the chain of a line, which has none yet, that follows a line with the chain `before`."""
    text = before + json.dumps(line, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _last_link(folder: Path) -> tuple[int, str]:
    """Return step and chain of the last line of a history; the beginning of a chain if there is none."""
    last = max(read_history(folder)[0].values(), key=lambda line: int(line["step"]), default=None)
    return (last["step"], last["chain"]) if last else (0, FIRST_CHAIN)


def discard_history(folder: Path, step: int) -> None:
    """Remove the lines after `step`, from which a run goes on without a history."""
    if (folder / FILE).exists():
        StepLines(folder / FILE, last=step).close()


def _mean(pairs: list[list[float]]) -> float | None:
    """Return the sum of losses divided by the sum of weights, free of an order; None if it is not finite."""
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return None
    total, weight = (math.fsum(column) for column in zip(*pairs, strict=True))
    return total / weight if weight else None


def read_history(folder: Path) -> tuple[dict[int, dict[str, Any]], str | None]:
    """Return the lines of a run's history by step, and what is wrong with the file, if anything.

    A last line without an end was cut off by a kill, or is being written: it does not count.
    """
    try:
        text = (folder / FILE).read_text(errors="replace")
    except OSError:
        return {}, None
    lines: dict[int, dict[str, Any]] = {}
    before = None
    for number, row in enumerate(text.split("\n")[:-1], 1):
        try:
            line = json.loads(row)
            own = {name: value for name, value in line.items() if name != "chain"}
            first = FIRST_CHAIN if line["step"] == 0 else None  # a run that branched off begins with another's chain
            before = before if before is not None else first
            if before is not None and chained(before, own) != line["chain"]:
                return lines, f"{folder / FILE} was changed: line {number} does not follow from those before it{ONLY}"
            lines[int(line["step"])], before = line, line["chain"]
        except (ValueError, TypeError, KeyError, AttributeError):
            return lines, f"{folder / FILE} is damaged: line {number} is not one that a run writes{ONLY}"
    return lines, None
