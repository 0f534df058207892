"""`lockstep verify RECIPE`: show that one equals N.

    lockstep verify dit --worlds 1,2,3,4 --steps 50 [flags of lockstep train]

The same short run is trained on each world, and once more with accumulation instead of ranks. What they did is
compared with the first: the samples of every step, every random draw by name, the losses, and the weights at the end.
In float64, the default, rounding can neither hide a difference nor fake one.

    lockstep verify dit --bits --worlds 1,2,3,4

The runs are exact ones (--exact), in the precision they would train in, compiled where they would be, dropout and all.
Weights, averages, optimizer state and logged losses must be equal as bits.
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .. import checkpoint, distributed, launch, registry, rng, rundir
from ..batchnorm import has_batch_norm
from ..flags import Request, parse
from ..options import LIMITS, Verify
from ..trainer import Trainer
from ..weights import read_weights

RANK_OF = "--rank_of"
"""How this command starts itself as a rank of one of its runs."""
ACCUMULATED = "1 rank, accumulation 4"
BY_SAMPLE = "on: every micro-batch has one sample, so that masks are the same on any number of ranks"
OFF = "off: it would depend on how the batch is cut, as BatchNorm does; --bits compares with dropout"


@dataclass
class Trace:
    """What one run did, step by step."""

    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    """The losses, and what else the recipe's loss logs."""
    samples: list[list[int]] = field(default_factory=list)
    """For each step the (epoch, index) pairs of all ranks, flattened."""
    draws: list[dict[str, Any]] = field(default_factory=list)
    """For each step and named draw a checksum over all samples; for normals a weighted sum."""
    digests: dict[str, str] = field(default_factory=dict)
    """With --bits: of each part of the state at the end."""
    batch_norm: bool = False
    """Whether the model has BatchNorm, which sees one micro-batch at a time."""
    unkeyed: list[str] = field(default_factory=list)
    """Notes on random numbers that the loss does not take from `rng`."""


def run(words: list[str]) -> int:
    """Exit status 1 if the runs differ."""
    if words[:1] == [RANK_OF]:
        return _worker(Path(words[1]))
    if not words or words[0].startswith("-"):
        raise ValueError("say what to verify: lockstep verify RECIPE [flags]")
    os.environ.pop("LOCKSTEP_SMOKE", None)  # it would cut the batch, by the world
    recipe = registry.find(words[0])
    options, flags = tyro.cli(
        Verify, args=words[1:], prog="lockstep verify RECIPE", use_underscores=True, return_unknown_args=True
    )
    flags = [*(["--preset", "laptop"] if "laptop" in recipe.presets and "--preset" not in flags else []), *flags]
    request = parse(recipe, flags, f"lockstep verify {recipe.name}")
    data = request.train.data
    batch = data.global_batch_size or data.batch_size * max(1, data.gradient_accumulation_steps)
    worlds = [int(w) for w in options.worlds.split(",")]
    dropout = "" if options.bits else _how_dropout_is_compared(request)
    if options.bits:
        runs = {_ranks(w): (w, max(1, batch // max(worlds))) for w in worlds}
    elif dropout == BY_SAMPLE:
        runs = {_ranks(w): (w, 1) for w in worlds}
    else:
        runs = {_ranks(w): (w, -(-batch // w)) for w in worlds} | {ACCUMULATED: (1, -(-batch // 4))}
    folders: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as parent:
        for i, (world, micro) in enumerate(runs.values()):
            own = asdict(options) | {"global_batch": batch, "micro": micro, "flags": flags, "spec": words[0]}
            own["dropout_off"] = dropout == OFF
            folders.append(Path(parent) / str(i))
            folders[-1].mkdir()
            (folders[-1] / "task.json").write_text(json.dumps(own))
            if status := launch.start(world, ["-m", "lockstep", "verify", RANK_OF, str(folders[-1])]):
                return status
        traces = [Trace(**json.loads((folder / "trace.json").read_text())) for folder in folders]
        if options.bits:
            return _report_bits(recipe.name, list(runs), traces, options.steps)
        status = _report(recipe.name, list(runs), traces, folders, options)
        unkeyed = next((trace.unkeyed for trace in traces if trace.unkeyed), []) if status else []
        for line in (*[f"dropout is {dropout}"] * bool(dropout), *unkeyed):
            print(line)
        return status


def _how_dropout_is_compared(request: Request) -> str:
    """Return how, if the model has dropout: its masks depend on how the global batch is cut."""
    model = (request.instance or request.recipe(request.options)).model()
    if not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return ""
    return OFF if has_batch_norm(model) else BY_SAMPLE


def _ranks(world: int) -> str:
    return f"{world} rank{'s' * (world > 1)}"


def _report_bits(name: str, runs: list[str], traces: list[Trace], steps: int) -> int:
    first, parts = traces[0], list(traces[0].digests)
    table = Table(title=f"{name}: {steps} steps, bits compared with {runs[0]}")
    for title in ("run", *parts, "logged", "verdict"):
        table.add_column(title)
    equal = True
    for label, trace in zip(runs[1:], traces[1:], strict=True):
        checks = [trace.digests[part] == first.digests[part] for part in parts]
        checks.append(json.dumps(trace.logged) == json.dumps(first.logged))  # as text, a NaN equals a NaN
        equal = equal and all(checks)
        table.add_row(label, *("equal" if c else "DIFFERENT" for c in checks), "ok" if all(checks) else "DIFFERENT")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0 if equal else 1


def _report(name: str, runs: list[str], traces: list[Trace], folders: list[Path], options: Verify) -> int:
    weights = [read_weights(folder / "weights.safetensors") for folder in folders]
    weight_limit, loss_limit = LIMITS[options.precision]
    table = Table(title=f"{name}: {options.steps} steps in {options.precision}, compared with {runs[0]}")
    for title in ("run", "max weight difference", "max loss difference", "samples", "draws", "verdict"):
        table.add_column(title)
    equal = True
    for label, trace, tensors in zip(runs[1:], traces[1:], weights[1:], strict=True):
        difference = weight_difference(weights[0], tensors)
        losses = _worst(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(traces[0].losses, trace.losses, strict=True))
        samples, draws = trace.samples == traces[0].samples, draws_equal(traces[0].draws, trace.draws)
        excused = label == ACCUMULATED and trace.batch_norm
        fine = (excused or (difference <= weight_limit and losses <= loss_limit)) and samples and draws
        equal = equal and fine
        verdict = "DIFFERENT" if not fine else "differs by BatchNorm" if excused else "ok"
        words = ("equal" if samples else "DIFFERENT", "equal" if draws else "DIFFERENT", verdict)
        table.add_row(label, f"{difference:.1e}", f"{losses:.1e}", *words)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0 if equal else 1


def weight_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its norm; infinite if the names differ."""
    if a.keys() != b.keys():
        return math.inf
    norms = [((a[n].double() - b[n].double()).norm(), a[n].double().norm()) for n in a]
    return _worst((d / n).item() if n > 0 else (0.0 if d == 0 else math.inf) for d, n in norms)


def _worst(differences: Iterable[float]) -> float:
    """Return the largest difference; NaN counts as infinite."""
    return max(math.inf if math.isnan(d) else d for d in differences)


def draws_equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Return whether checksums are equal to the bit, and sums of normals up to rounding."""
    if [step.keys() for step in a] != [step.keys() for step in b]:
        return False
    pairs = [(one[name], other[name]) for one, other in zip(a, b, strict=True) for name in one]
    return all(x == y if isinstance(x, int) else math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-6) for x, y in pairs)


class Recorder:
    """Records a checksum of every random draw of this process."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    def attach(self) -> None:
        for kind in ("uniform", "normal", "integers", "bernoulli"):
            setattr(rng.Rng, kind, self._recorded(kind, getattr(rng.Rng, kind)))

    def _recorded(self, kind: str, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(source: rng.Rng, name: str, *arguments: Any, **options: Any) -> Tensor:
            values = draw(source, name, *arguments, **options)
            self._add(f"{kind} {name}", source.keys, values.detach().reshape(len(source.keys), -1))
            return values

        return recorded

    @torch.no_grad()
    def _add(self, name: str, keys: Tensor, values: Tensor) -> None:
        """Add a sum over samples, so that it does not matter which rank has which; weighted by key and position."""
        weight = 2 * torch.arange(values.shape[1], device=values.device) + 1
        if name.startswith("normal "):
            total: Any = (values.double() * (weight % 61)).sum().item() if values.numel() else 0.0
        else:
            bits = values.double().view(torch.int64) if values.is_floating_point() else values.long()
            total = ((bits * weight).sum(1) * (keys | 1)).sum().item()
        self.sums[name] = self.sums.get(name, 0) + total

    def collect(self) -> dict[str, Any]:
        """Return the sums since the last call."""
        sums, self.sums = self.sums, {}
        return sums


def _add_up(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    names = sorted({name for rank in ranks for name in rank})
    sums = {name: sum(rank[name] for rank in ranks if name in rank) for name in names}
    return {name: value % (1 << 64) if isinstance(value, int) else value for name, value in sums.items()}


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all names, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _share_gpus(device: str) -> None:
    """Let this rank use the first GPU if there are more ranks than GPUs: right for a proof, useless for speed."""
    if device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _worker(folder: Path) -> int:
    """Train as one rank of one run, and write its trace."""
    task = json.loads((folder / "task.json").read_text())
    forced = {"precision": task["precision"], "device": task["device"], "global_batch_size": task["global_batch"]}
    forced |= {"batch_size": task["micro"], "n_steps": task["steps"], "num_workers": 0}
    flags = [*task["flags"], *(word for k, v in forced.items() for word in (f"--{k}", str(v)))]
    # A loss that depends on the rank is to be seen in what is compared here, not to end the run.
    flags += ["--exact", "--spot_check_every", "0"] if task["bits"] else ["--compile", "off"]
    found = registry.find(task["spec"])
    request = parse(found, [*flags, "--out", str(folder / "run")], "lockstep verify")
    hardware, recorder, trace = request.train.hardware, Recorder(), Trace()
    if not task["bits"]:
        recorder.attach()
    _share_gpus(task["device"])
    with distributed.session(hardware.device, hardware.timeout) as world:
        trainer = Trainer(request, world, rundir.resolve_run_dir(request.train.run, found.name, world))
        for module in trainer.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and task["dropout_off"]:
                module.p = 0.0
        trainer.model.train()
        recorder.collect()
        for _ in range(task["steps"]):
            trainer.train_step()
            trainer.progress.step += 1
            trainer.step.confirm()
            trace.logged.append(trainer.step.loss_sums.means(world))
            trace.losses.append(next(iter(trace.logged[-1].values())))
            used = [pair for part in trainer.step.samples_used for pair in zip(part.epoch, part.index, strict=True)]
            trainer.check_ranks()
            ranks = world.gather(([(int(e), int(i)) for e, i in used], recorder.collect()))
            if world.is_main:
                trace.samples.append([x for pair in sorted(p for pairs, _ in ranks for p in pairs) for x in pair])
                trace.draws.append(_add_up([draws for _, draws in ranks]))
        tensors, _ = trainer.state.capture()
        if world.is_main:
            trace.digests = {part: _digest(found) for part, found in tensors.items()}
            trace.batch_norm, trace.unkeyed = has_batch_norm(trainer.model), trainer.step.unkeyed_draws
            (folder / "trace.json").write_text(json.dumps(asdict(trace)))
            checkpoint.export(folder / "weights", trainer.model.state_dict(), {})
        del trainer
    return 0
