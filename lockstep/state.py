"""Everything that changes while a run trains: what a checkpoint holds, captured and restored part by part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from .batching import Position
from .checkpoint import Checkpoint, export
from .exact import Exactness, ExactSums
from .optim import Ema, OptimizerState, Update
from .pieces import Pieces, Tensors
from .watch.history import History
from .watch.ledger import Ledger
from .weights import check_shapes


class Stateful(Protocol):
    """As in PyTorch."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass
class Progress:
    """How far a run is, and its best evaluation."""

    best: float
    step: int = 0
    bad_evaluations: int = 0
    """Evaluations in a row without improvement."""
    new_best: bool = False
    """Whether the last evaluation was the best, and is not saved yet."""
    next_item: Position | None = None
    """Of an iterable data set: where the next step begins."""

    @classmethod
    def start(cls, mode: Literal["min", "max"]) -> "Progress":
        return cls(math.inf if mode == "min" else -math.inf)

    def evaluated(self, value: float, mode: Literal["min", "max"], min_delta: float) -> None:
        """Compare an evaluation with the best one so far."""
        sign = 1 if mode == "min" else -1
        if sign * value < sign * self.best - (0 if math.isinf(self.best) else min_delta):
            self.best, self.bad_evaluations, self.new_best = value, 0, True
        else:
            self.bad_evaluations += 1

    def state_dict(self) -> dict[str, Any]:
        numbers = {"step": self.step, "best": self.best, "bad_evaluations": self.bad_evaluations}
        return numbers | ({"next_item": list(self.next_item)} if self.next_item else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.best, self.bad_evaluations = state["step"], state["best"], state["bad_evaluations"]
        if "next_item" in state:
            self.next_item = Position(*state["next_item"])

    def facts(self) -> dict[str, str]:
        """Return what must be the same on all ranks, in words, beside the step."""
        name = "the hash of the last item read, which must be the same on all ranks,"
        return {name: self.next_item.before} if self.next_item else {}


class TrainState:
    """Model, optimizer, averages, schedule, counters."""

    def __init__(
        self,
        model: nn.Module,
        update: Update,
        emas: list[Ema],
        ledger: Ledger,
        progress: Progress,
        exactness: Exactness | None = None,
        history: History | None = None,
    ):
        self.model, self.update, self.emas, self.ledger, self.progress = model, update, emas, ledger, progress
        self.exactness, self.history = exactness, history
        self._sums: ExactSums | None = None
        sharding = update.sharding
        parameters = sharding.parameters(model) if sharding else dict(model.named_parameters())
        self._tensors: dict[str, Stateful] = {
            "model": sharding.model_state(model) if sharding else model,
            **{
                f"optimizer-{name}" if name else "optimizer": OptimizerState(one, parameters)
                for name, one in update.optimizers.items()
            },
            **{f"ema-{ema.decay}": ema for ema in emas},
        }
        """By file of the checkpoint."""
        self._numbers: dict[str, Stateful] = {
            "progress": progress,
            "update": update,
            "schedule": update.schedule,
            "ledger": ledger,
        }
        """By key of state.json."""
        if update.scaler is not None:
            self._numbers["scaler"] = update.scaler
        if exactness is not None:
            self._numbers["exact"] = exactness
        if history is not None:
            self._numbers["history"] = history

    @property
    def sums(self) -> ExactSums | None:
        """Of an exact run with more than one tile: the sums of its gradients."""
        return self._sums

    @sums.setter
    def sums(self, sums: ExactSums) -> None:
        self._sums = self._tensors["exact"] = sums

    def replicated(self, own: set[str], everything: bool) -> dict[str, Tensor]:
        """Return, by "<part>/<name>", the tensors that must be equal on every rank: all but the names in `own`.

        Unless `everything` is asked for, only the model's.
        """
        chosen = [name for name in self._tensors if name == "model" or everything]
        parts: dict[str, Mapping[str, Tensor]] = {name: self._tensors[name].state_dict() for name in chosen}
        if (sharding := self.update.sharding) is not None:
            parts = {name: sharding.replicated(name, tensors) for name, tensors in parts.items()}
        return {
            name if part == "model" else f"{part}/{name}": tensor
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
            if name not in own
        }

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors and numbers of a checkpoint; of a sharded run, whole on rank 0. Every rank calls this."""
        return {name: self._whole(part.state_dict()) for name, part in self._tensors.items()}, self.numbers()

    def pieces(self) -> Pieces:
        """Return what this rank writes of a checkpoint of a sharded run, by "<part>/<name>"."""
        sharding = self.update.sharding
        assert sharding is not None, "the ranks of a run without sharding hold no pieces"
        return {
            f"{part}/{name}": piece
            for part, stateful in self._tensors.items()
            for name, piece in sharding.pieces(stateful.state_dict()).items()
        }

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of a checkpoint."""
        numbers = {name: dict(part.state_dict()) for name, part in self._numbers.items()}
        return {"optimizer": self.update.kinds(), **numbers}

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part; of a sharded run those of all ranks, on rank 0."""
        return dict(tensors) if self.update.sharding is None else self.update.sharding.gather(tensors)

    def restore(self, saved: Checkpoint) -> None:
        """Continue where the checkpoint was made, on any number of ranks."""
        source, optimizer = str(saved.path), self.update.kinds()
        if saved.state["optimizer"] != optimizer:
            raise ValueError(f"{source} was made with {saved.state['optimizer']}; give the --optimizer of its run")
        for ema in self.emas:
            if f"ema-{ema.decay}" not in saved.tensors:
                raise ValueError(f"{source} has no averages with decay {ema.decay}; give the --ema_decay of its run")
        check_shapes(self.model.state_dict(), saved.tensors["model"], source)
        for name, part in self._tensors.items():
            if name in saved.tensors or name != "exact":  # a run may become exact when it is resumed
                whole, sharding = saved.tensors[name], self.update.sharding
                part.load_state_dict(sharding.own(whole, name == "optimizer") if sharding else whole)
        flat = saved.state if "progress" not in saved.state else None  # version 0.1 wrote most numbers side by side
        for name, part in self._numbers.items():
            if (numbers := saved.state.get(name, None if name in ("exact", "history") else flat)) is not None:
                part.load_state_dict(numbers)

    def export(self, folder: Path | None, recipe: str) -> None:
        """Write the weights, and each average of them, as plain files for use without Lockstep.

        Every rank calls this; `folder` is that of rank 0, and None elsewhere.
        """
        facts = {"recipe": recipe, "step": str(self.progress.step)}
        files: list[tuple[str, Stateful, dict[str, str]]] = [("model", self._tensors["model"], facts)]
        for ema in self.emas:
            name = "model_ema" if ema is self.emas[0] else f"model_ema-{ema.decay}"
            files.append((name, ema, {**facts, "decay": str(ema.decay)}))
        for name, part, facts in files:
            whole = self._whole(part.state_dict())
            if folder is not None:
                export(folder / name, whole, facts)
