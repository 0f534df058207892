"""The loop. `train_step` is the whole training step; `fit` is what happens around it.

trainer = Trainer(request, world, place)
outcome = trainer.fit()
"""

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, evaluate, trackers
from .config import Request
from .distributed import Signals, World
from .job import Job
from .recipe import Sums
from .rng import Rng
from .run import Place
from .watch import OutOfLockstep

__all__ = ["Diverged", "NotSaved", "OutOfLockstep", "OutOfMemory", "Outcome", "Trainer"]


OUT_OF_MEMORY = 1000
"""Among what ranks wish, more urgent than any signal."""


class Diverged(RuntimeError):
    """The gradient has not been finite for too many steps in a row."""


class NotSaved(RuntimeError):
    """The run came to its end but its last state could not be written."""


class OutOfMemory(RuntimeError):
    """There is no smaller piece to cut the batch into."""


@dataclass
class Outcome:
    """How a run ended."""

    step: int
    folder: Path
    stopped_by: str | None = None
    """None at the planned end; `patience`, or the name of a signal."""
    made: tuple[Path, ...] = ()


class Totals:
    """Sums of losses and weights since the last log, kept on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    def add(self, total: Tensor, weight: float | Tensor, logs: dict[str, Tensor]) -> None:
        for name, value in {"loss": total, "weight": weight, **logs}.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self, world: World) -> dict[str, float]:
        """Each sum over all ranks divided by the weight; the only place where training waits for the device."""
        sums, self.sums = self.sums, {}
        values = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in sums.values()])
        reduced = dict(zip(sums, world.sum(values).tolist(), strict=True))
        weight = reduced.pop("weight")
        return {name: value / weight if weight else math.nan for name, value in reduced.items()}


class Trainer(Job):
    """The loop over a job: steps, and what is due between them."""

    def __init__(self, request: Request, world: World, place: Place):
        super().__init__(request, world, place)
        self.signals = Signals()
        self.wish = 0
        """What some rank wants: the number of a signal, or OUT_OF_MEMORY; agreed in every step."""
        self.totals = Totals()
        self.made: tuple[Path, ...] = ()
        self.trackers = trackers.Trackers({})
        if world.is_main:
            self.checkpoints = checkpoint.Checkpoints(place.folder / "checkpoints", self.config.run.keep)

    def train_step(self) -> None:
        """One optimizer update from one global batch."""
        before, short, self.replica.buckets.issued = self.totals.sums.copy(), False, 0
        try:
            micros, per_sample = self.weighed(self.loader.step()) if self.weighs else (self.loader.step(), None)
            for micro in micros:
                if not len(micro.indices):
                    continue  # more micro-batches than samples on this rank; never the last one
                with nullcontext() if micro.last else self.replica.no_sync():
                    with self.precision.autocast:
                        total, weight, logs = self.replica.forward(micro.batch, micro.epochs, micro.indices, per_sample)
                    self.update.loss(total, weight, len(micro.indices)).backward()
                self.totals.add(total, weight, logs)
                self.watch.ledger.used.append((self.step, micro.samples))
        except torch.OutOfMemoryError:
            if self.shares_batch_norm:
                raise  # the others wait in the middle of a forward pass: nothing can be agreed on there
            short = True
            self.replica.buckets.release()
        self.wish = self.world.largest(OUT_OF_MEMORY if short else self.signals.received)
        if self.wish == OUT_OF_MEMORY:
            self.totals.sums, total, weight, logs = before, None, None, None
            self._redo_in_smaller_pieces()
            return
        self.update.step(self.step)
        for ema in self.emas:
            ema.update(self.step)

    def _redo_in_smaller_pieces(self) -> None:
        """Some rank had not enough memory. All of them halve the micro-batch; the global batch stays what it is."""
        old = self.sizes
        if old.micro_batch == 1:
            raise OutOfMemory("there is not enough memory for a single sample; use a smaller model or input")
        micro = -(-old.micro_batch // 2)
        share = -(-old.global_batch // old.world)
        accumulation = -(-share // micro)
        self.sizes = replace(old, micro_batch=micro, accumulation=accumulation)
        self.say(
            f"out of memory at step {self.step + 1}: micro-batch {old.micro_batch} -> {micro}, accumulation "
            f"{old.accumulation} -> {accumulation}; the global batch stays {old.global_batch}"
        )
        self.update.forget()
        self.watch.ledger.used = [entry for entry in self.watch.ledger.used if entry[0] != self.step]
        del self.replica, self.loader
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.prepare()
        self.train_step()

    def fit(self) -> Outcome:
        """Train to the end, or until somebody wants to stop; then leave everything saved."""
        self._open()
        try:
            return self._loop()
        finally:
            if self.world.is_main:
                self.checkpoints.wait()
            self.trackers.close()

    def _loop(self) -> Outcome:
        stopped_by, run = None, self.config.run
        self._clock, self._logged = time.perf_counter(), self.step
        self.model.train()
        with self.signals:
            while self.step < self.sizes.n_steps and stopped_by is None:
                self.train_step()
                self.step += 1
                at_end = self.step == self.sizes.n_steps
                self.trackers.advance(self.step)
                if at_end or self.step % run.log_every == 0:
                    self._log()
                if at_end or self._due("eval"):
                    self._evaluate()
                if run.patience and self.bad_evaluations >= run.patience:
                    stopped_by = "patience"
                elif self.wish and not at_end:
                    stopped_by = signal.Signals(self.wish).name
                elif not at_end and (self.new_best or self._due("save")):
                    self._save()
                if not at_end and stopped_by is None:
                    if self._due("sample"):
                        self._sample()
                    if self.recipe.score_every and self.step % self.recipe.score_every == 0:
                        self._score()
            return self._close(stopped_by)

    def _due(self, kind: str) -> bool:
        return self.every[kind] > 0 and self.step % self.every[kind] == 0

    def _open(self) -> None:
        """Say what is about to happen, before it does."""
        if not self.world.is_main:
            return
        folder, run = self.place.folder, self.config.run
        self.request.write(folder / "config.yaml")
        receipt = self.receipt()
        receipt.write(folder / "receipt.json")
        receipt.show()
        resumed = self.step if self.place.start else None
        events = Path(run.logdir) if run.logdir else folder / "tensorboard"
        console = trackers.Console(self.sizes.n_steps, self.step)
        self.trackers = trackers.Trackers({"the console": lambda: console})  # for what the others have to say
        where: dict[str, Callable[[], trackers.Tracker]] = {
            "the console": lambda: console,
            "metrics.jsonl": lambda: trackers.JsonLines(folder / "metrics.jsonl", resumed),
        }
        if run.curves:
            where["curves.png"] = lambda: trackers.Curves(folder / "metrics.jsonl", folder / "curves.png")
        if run.tensorboard:
            where["TensorBoard"] = lambda: trackers.TensorBoard(events, resumed)
        if run.use_wandb:
            name, settings = run.wandb_name or folder.name, self.request.flat()
            where["W&B"] = lambda: trackers.Wandb(folder, run.wandb_project, name, settings, self._wandb_id())
        self.trackers = trackers.Trackers(where, self.say)

    def _wandb_id(self) -> str:
        """One run folder is one W&B run, through all its resumptions."""
        return "".join(c if c.isalnum() else "-" for c in str(self.place.folder))[-60:]

    def say(self, text: str) -> None:
        """A line to the user, once, and into log.txt."""
        if self.world.is_main:
            self.trackers.message(text)
            with suppress(OSError), (self.place.folder / "log.txt").open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _log(self) -> None:
        """Numbers of the steps since the last log, and the checks that come with them."""
        values = self.totals.means(self.world)
        now, steps = time.perf_counter(), self.step - self._logged
        bad_in_row, lr = int(self.update.bad_in_row), self.update.optimizer.param_groups[0]["lr"]
        scale = self.precision.scaler and self.precision.scaler.scale.item()
        self.watch.check(self.step, lr=lr, scale=scale, weight_of_a_sample=f"{self.update.per_sample or 0:.9g}")
        values |= {
            "lr": lr,
            "grad_norm": float(self.update.norm),
            "epoch": self.step / self.sizes.steps_per_epoch,
            "samples_per_second": steps * self.sizes.global_batch / (now - self._clock),
            "skipped_steps": int(self.update.bad_steps),
            "epochs_proven": self.watch.ledger.complete,
            "watch_seconds": self.watch.seconds,
        }
        self.trackers.log(self.step, values)
        if bad_in_row >= self.config.optim.max_bad_steps:
            raise Diverged(
                f"the gradient was not finite in the last {bad_in_row} steps (up to step {self.step}); lower --lr, "
                f"set --clip_grad, or look at the data. The weights are those of before: {self.place.folder}"
            )
        if self.world.is_main and (failure := self.checkpoints.failure()):
            self.say(failure)
        self._clock, self._logged = time.perf_counter(), self.step

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Time spent within does not count as training in samples per second."""
        start = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has its first averaged weights, if there are any."""
        with self.emas[0].applied() if self.emas else nullcontext():
            yield

    def _evaluate(self) -> None:
        """Metrics on the validation set; the same on every rank, and so is what follows from them."""
        if self.validation is None:
            return
        size, run = 2 * self.sizes.micro_batch, self.config.run
        limit = 2 * size * self.world.size if self.request.smoke else None
        with self._aside(), self.averaged():
            values, _ = evaluate.evaluate(
                self.recipe, self.model, self.validation, self.world, size, self.precision.autocast,
                self.config.data.seed, limit,
            )  # fmt: skip
        self.trackers.log(self.step, {f"val/{name}": value for name, value in values.items()})
        if run.best_metric not in values and not self.every["eval"]:
            return
        if run.best_metric not in values:
            raise ValueError(f"best_metric is one of {', '.join(values)}, not {run.best_metric}")
        value, sign = values[run.best_metric], 1 if run.best_mode == "min" else -1
        if sign * value < sign * self.best - (0 if math.isinf(self.best) else run.min_delta):
            self.best, self.bad_evaluations, self.new_best = value, 0, True
        else:
            self.bad_evaluations += 1
        self.update.schedule.evaluated(self.bad_evaluations)

    def _score(self) -> None:
        """Values that need generated samples, from the averaged weights, made by all ranks."""
        seed = self.config.data.seed

        def total(count: int, batch_size: int, part: Callable[[range, Rng], Sums]) -> dict[str, Tensor]:
            return evaluate.total(count, batch_size, part, self.world, seed)

        with self._aside(), self.averaged(), evaluate.in_use(self.model), self.precision.autocast, torch.no_grad():
            values, remark = self.recipe.score(self.model, total, self.place.folder)
        self.trackers.log(self.step, values)
        if remark:
            self.say(remark)

    def _sample(self) -> None:
        """The recipe's galleries, from the plain and from the averaged weights, made by all ranks."""
        for name, settings in self.recipe.galleries().items():
            for weights in ("ema", "plain") if self.emas else ("plain",):
                with self._aside(), self.averaged() if weights == "ema" else nullcontext():
                    self._gallery(name, weights, dict(settings))

    def _gallery(self, name: str, weights: str, settings: dict[str, Any]) -> None:
        seed, count = self.config.data.seed, settings.pop("n")
        autocast = self.precision.autocast
        samples = evaluate.generate(self.recipe, self.model, count, settings, self.world, autocast, seed)
        if samples is None:
            return
        folder = self.place.folder / "samples"
        folder.mkdir(exist_ok=True)
        made = self.recipe.save_samples(samples, folder / f"step-{self.step:08d}-{name}-{weights}")
        for path in made:
            self.trackers.picture(self.step, f"samples/{name}-{weights}", path)
        self.made = (*self.made[-7:], *made)

    def _save(self, final: bool = False) -> None:
        """Hand a copy of everything to the writer. Every rank calls this: their generators are part of the state."""
        self.watch.check(self.step)  # what is saved is right, and the ledger stands where the weights do
        generators = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.world.device)
        ranks = self.world.gather(generators)
        bad_steps, best, self.new_best = int(self.update.bad_steps), self.new_best, False
        if not self.world.is_main:
            return
        tensors, state = self.capture(ranks, bad_steps)
        pause = self.checkpoints.save(self.step, tensors, state, best=best, final=final)
        self.trackers.log(self.step, {"checkpoint_pause_seconds": pause})

    def _save_for_good(self, final: bool) -> None:
        """The last save has to succeed, on a second try if need be, or the run has failed on all ranks."""
        failure = None
        for _ in range(2):
            self._save(final)
            if self.world.is_main:
                self.checkpoints.wait()
                failure = self.checkpoints.failure()
                if failure and self.checkpoints.written == self.step:
                    self.say(failure)
                    failure = None
            failure = self.world.broadcast(failure)
            if failure is None:
                return
        raise NotSaved(f"the state after step {self.step} could not be saved: {failure}")

    def _close(self, stopped_by: str | None) -> Outcome:
        """Save what there is, write the weights as plain files, make the last samples, and let go of everything."""
        done = stopped_by in (None, "patience")
        if self.step > self.started:
            self._save_for_good(done)
        if done and self.world.is_main:
            self._export()
        if done:
            self._sample()
        if done and 0 < self.recipe.score_every <= self.step:
            self._score()
        del self.replica, self.loader
        return Outcome(self.step, self.place.folder, stopped_by, self.made)

    def _export(self) -> None:
        facts = {"recipe": self.request.recipe.name, "step": str(self.step)}
        checkpoint.export(self.place.folder / "model", self.model.state_dict(), facts)
        for ema in self.emas:
            name = "model_ema" if ema is self.emas[0] else f"model_ema-{ema.decay}"
            checkpoint.export(self.place.folder / name, ema.shadow, {**facts, "decay": str(ema.decay)})
