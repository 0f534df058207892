"""Two runs compared from what they have left in their folders: settings, launches, losses, histories."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Run
from .plots import Series, read_metrics
from .rundir import first_launch, launch_of, read_receipt
from .watch.history import read_history

NO_EFFECT = {field.name for field in dataclasses.fields(Run)} | {
    "num_workers", "timeout", "hang_timeout", "max_restarts", "history_every", "distributed", "dist_url",
}  # fmt: skip
"""Settings that change no weights. (best_metric and eval_every do, with the schedule plateau alone.)"""
IDLE = "settings without effect on the weights"
CAUSED_BY_INPUT = ("settings", "tiles", "data", "recipe")
"""What a replay of a run, on any machine, takes from the run itself."""
Pairs = dict[str, tuple[Any, Any]]
"""By name, the values in both runs."""
Differences = dict[str, Pairs]
"""By group: settings, data, ..."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What a run has left in its folder."""

    folder: Path
    receipt: dict[str, Any]
    history: dict[int, Line]
    problem: str | None
    """What is wrong with the file of its history."""
    metrics: dict[str, Series]
    """By name of the value and step, as logged; a training loss is a mean over the steps since the log before."""

    @classmethod
    def read(cls, folder: Path) -> "Record":
        return cls(folder, read_receipt(folder), *read_history(folder), read_metrics(folder / "metrics.jsonl"))

    @property
    def began(self) -> int:
        """The step after which the run began: 0, or where it branched off from another run."""
        return int(first_launch(self.receipt).get("step", 0))

    def settings(self, step: int) -> dict[str, Any]:
        """Return the settings that `step` was made with."""
        return launch_of(self.receipt, step).get("settings") or self.receipt.get("settings") or {}

    def losses(self) -> Series:
        """Return the logged losses that are means over `log_every` steps: not the first one after a resume."""
        found = dict(self.metrics.get("loss", {}))
        for began in (int(launch["step"]) for launch in self.receipt.get("launches", [])):
            if began % self.settings(began + 1).get("log_every", 1):
                found.pop(min((step for step in found if step > began), default=0), None)
        return found


@dataclass(frozen=True)
class Parting:
    """Where two histories part."""

    step: int
    fields: list[str]
    """What differs at that step."""
    same: int | None
    """The last step before it at which all is the same; None if there is none."""


def first_difference(a: Mapping[int, Line], b: Mapping[int, Line]) -> Parting | None:
    """Return the first step of both histories at which they differ."""
    same = None
    for step in sorted(a.keys() & b.keys()):
        names = [name for name in a[step] if name in b[step] and name != "chain" and a[step][name] != b[step][name]]
        if names:
            return Parting(step, names, same)
        same = step
    return None


def first_loss_difference(curves: "Curves | None", a: Mapping[int, Line], b: Mapping[int, Line]) -> Parting | None:
    """Return where the logged losses of two exact runs first differ, for steps of which not both have a line."""
    if curves is None or curves.first is None or not a or not b:
        return None
    same = max((step for step in a.keys() & b.keys() if step < curves.first), default=None)
    return Parting(curves.first, ["loss"], same)


def differing(a: Record, b: Record, step: int) -> Differences:
    """Return what differs between two runs, with the launches that made `step`, by group."""
    one, other = launch_of(a.receipt, step), launch_of(b.receipt, step)
    settings, idle = differing_settings(a.settings(step), b.settings(step))
    cut = settings.keys() & {"batch_size", "global_batch_size"}  # other tiles follow from these
    groups = {
        "settings": settings,
        IDLE: idle,
        "tiles": {} if cut else _pairs({"number": a.receipt.get("tiles")}, {"number": b.receipt.get("tiles")}),
        "data": _data(one.get("data", {}), other.get("data", {}), same_samples="seed" not in settings),
        "recipe": _pairs({"code": one.get("recipe")}, {"code": other.get("recipe")}),
        "lockstep": _pairs({"version": one.get("lockstep")}, {"version": other.get("lockstep")}),
        "versions": _pairs(one.get("versions", {}), other.get("versions", {})),
        "hardware": _pairs(one.get("hardware", {}), other.get("hardware", {})),
        "world": _pairs({"ranks": one.get("world")}, {"ranks": other.get("world")}),
    }
    return {group: found for group, found in groups.items() if found}


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Pairs, Pairs]:
    """Return the settings that differ: those that change weights, and those that do not."""
    endless = all(settings.get("schedule") in ("constant", "step", "plateau") for settings in (a, b))
    without_effect = NO_EFFECT | ({"n_steps", "epochs"} if endless else set())
    found = _pairs(a, b)
    idle = {name: pair for name, pair in found.items() if name in without_effect}
    return {name: pair for name, pair in found.items() if name not in idle}, idle


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)}


def _data(a: Mapping[str, list[str]], b: Mapping[str, list[str]], same_samples: bool) -> Pairs:
    """Compare sizes, and as many samples as both have read: a slow data set is sampled less, another seed elsewhere."""
    cut = {name: min(len(a.get(name, [])), len(b.get(name, []))) if same_samples else 1 for name in {*a, *b}}
    short_a, short_b = ({n: tuple(found[n][: cut[n] or None]) for n in found} for found in (a, b))
    return {name: (_brief(one), _brief(other)) for name, (one, other) in _pairs(short_a, short_b).items()}


def _brief(found: tuple[str, ...] | None) -> str:
    if found is None:
        return "missing"
    return found[0] + "".join(f", first read {digest[:8]}" for digest in found[1:2])


@dataclass(frozen=True)
class Curves:
    """How far two runs' logged losses are apart."""

    count: int
    first: int | None
    """The first step at which they differ."""
    largest: float
    at: int


def same_intervals(a: Record, b: Record) -> bool:
    """Return whether a loss that both have logged at a step is a mean over the same steps."""
    one, other = (run.receipt.get("settings", {}).get("log_every") for run in (a, b))
    return bool(one == other)


def curves(a: Series, b: Series) -> Curves | None:
    """Return the differences of logged losses; None if there is no step that both have logged."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    apart = {step: _difference(a[step], b[step]) for step in steps}
    at = max(steps, key=lambda step: apart[step])
    return Curves(len(steps), next((step for step in steps if apart[step]), None), apart[at], at)


def _difference(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def first_tensor(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, str, str, int] | None:
    """Return step, kind (gradient or weights) and name of the first tensor that differs, and how many of them do.

    `a` and `b`: by step, the checksums of the tensors of each kind, in the order of the model.
    """
    for step in sorted(a.keys() & b.keys(), key=int):
        for kind in ("gradient", "weights"):
            one, other = a[step].get(kind, {}), b[step].get(kind, {})
            if names := [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]:
                return int(step), kind, names[0], len(names)
    return None


def causes(differences: Differences, reproduced: bool | None) -> str:
    """Return what made two exact runs part, if there is only one thing that can have.

    `reproduced`: whether replays on one machine, with one version of everything, part as well.
    """
    groups = {g: found for g, found in differences.items() if g != IDLE}
    groups.pop("world", None)  # an exact run does not depend on it
    if reproduced is not None:
        groups = {g: found for g, found in groups.items() if (g in CAUSED_BY_INPUT) == reproduced}
    named = [f"{group}: {name} ({one} and {other})" for group, f in groups.items() for name, (one, other) in f.items()]
    if len(named) == 1:
        return f"cause: {named[0]}"
    if named:
        return "cause: one of these, or several of them: " + "; ".join(named)
    return (
        "cause: nothing recorded differs that could make them part: a machine that has computed wrongly, or randomness "
        "that does not come from rng"
    )
