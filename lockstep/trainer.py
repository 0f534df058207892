"""The loop over a run's steps, and what is due between them; the step itself is in step.py.

trainer = Trainer(request, world, run_dir)
outcome = trainer.fit()
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from . import activity, checkpoint, trackers
from .bad_steps import BadSteps
from .distributed import World
from .evaluate import EvaluationStopped, Evaluator, check_metric, unknown_metric
from .exact import plain_errors
from .flags import Request
from .outcome import NotSaved, Outcome
from .receipt import make_receipt
from .recipe import Evaluates, Scores
from .rundir import RunDir
from .sampling import Sampler
from .setup import prepare
from .sharding import RankFiles
from .step import TrainStep
from .stop_signals import StopSignals
from .watch.history import discard_history
from .watch.live import load_text
from .watch.times import Times, TimeUse


class Trainer:
    """The loop over a run: steps, and what is due between them."""

    def __init__(self, request: Request, world: World, run_dir: RunDir):
        self.setup, self.state, self.watch = prepare(request, world, run_dir)
        self.config, self.world, self.folder = request.train, world, run_dir.path
        self.recipe, self.precision = self.setup.recipe, self.setup.precision
        self.model, self.update, self.progress = self.state.model, self.state.update, self.state.progress
        self.resumed_step = self.progress.step
        seed, exact, autocast = self.config.data.seed, self.config.hardware.exact, self.precision.autocast
        self.evaluator = Evaluator(self.recipe, self.model, world, autocast, seed, self.setup.whole_model, exact)
        self.sampler = Sampler(
            self.evaluator, self.state.emas, self.folder, lambda text: self.trackers.status(text), self.say
        )
        self.times = TimeUse(world, self.folder, self.resumed_step, self.config.data.num_workers)
        self.signals = StopSignals(self.say)
        self.stop_request = 0
        """Agreed by all ranks in every step: the number of a signal, OUT_OF_MEMORY, or 0."""
        self.bad_steps = BadSteps(self.update, self.config.optim, self.evaluator, self.setup.data, self.folder)
        self.metrics: dict[str, float] = {}
        self.sample_files: tuple[Path, ...] = ()
        self.trackers = trackers.Trackers({})
        if world.is_main:
            self.checkpoints = checkpoint.Checkpoints(self.folder / "checkpoints", self.config.run.keep)
        self.rank_files = RankFiles(world) if self.update.sharding is not None else None
        with plain_errors():
            self.step = TrainStep(self.setup, self.state, self.watch, self.times.steps, self.say)
        run_dir.notes.extend(self.step.unkeyed_draws)

    def train_step(self) -> None:
        """Make one optimizer update from one global batch, by all ranks."""
        with plain_errors():
            self.stop_request = self.step.run(self.signals.received)

    def redo_step(self) -> None:
        """Make one step of a replay, and the evaluation after it if the learning rate follows it."""
        self.train_step()
        self.progress.step += 1
        self.step.confirm()
        self.step.samples_used.clear()
        if self.update.schedule.kind == "plateau" and self._is_due("eval"):
            self._evaluate()

    def fit(self) -> Outcome:
        """Train to the end, or until a stop is requested; then save everything."""
        self._check_length()
        self._check_best_metric()
        self._open_trackers()
        try:
            return self._loop()
        finally:
            # A signal now must not end a complete run as a failed one.
            self.signals.work = "what is being written"
            with self.signals, self.world.activity.during(activity.CLOSING):
                if self.world.is_main:
                    self.checkpoints.wait()
                elif self.rank_files is not None:
                    self.rank_files.wait()
                self.trackers.close()
                self.times.close()
                if self.state.history is not None:
                    self.state.history.close()

    def _loop(self) -> Outcome:
        stopped_by, run, progress, n_steps = None, self.config.run, self.progress, self.setup.batching.n_steps
        self._logged_at, self._logged_step = time.perf_counter(), progress.step
        self.world.activity.step = progress.step
        self.world.activity.enter(activity.FIRST_STEP)
        self.model.train()
        with self.signals:
            if self.setup.run_dir.resumes_own_run:
                if self.world.is_main:
                    self.sampler.discard_after(progress.step)
                if progress.step < n_steps:
                    self._sample_and_score()  # a run that was killed in the middle of it has some left
            if progress.step >= n_steps:
                self.say(
                    f"nothing to train: the run is at its last step, {progress.step:,}; --n_steps N makes it longer"
                )
            if self.setup.compiled:
                self.trackers.status("compiling the model: the first step takes longer than the others")
            while progress.step < n_steps and stopped_by is None:
                self.times.steps.start()
                self.train_step()
                self.times.steps.finish()
                progress.step += 1
                self.world.activity.finish_step(progress.step, self.world.device.type == "cuda")
                at_end = progress.step == n_steps
                self.trackers.advance(progress.step)
                if at_end or progress.step % run.log_every == 0:
                    with self.world.activity.during(activity.LOGGING):
                        self._log()
                if at_end:
                    self._unless_stopped("the final evaluation", self._evaluate)
                elif self._is_due("eval"):
                    self._evaluate()
                if run.patience and progress.bad_evaluations >= run.patience:
                    stopped_by = "patience"
                elif self.stop_request and not at_end:
                    stopped_by = signal.Signals(self.stop_request).name
                elif not at_end and (progress.new_best or self._is_due("save")):
                    with self.world.activity.during(activity.SAVING):
                        self._save()
                if not at_end and stopped_by is None:
                    self._sample_and_score()
            return self._finish(stopped_by)

    def _is_due(self, what: str) -> bool:
        every = self.setup.every(what)
        return every > 0 and self.progress.step % every == 0

    def _open_trackers(self) -> None:
        """Write and show the receipt, and open everything that values are logged to."""
        if self.state.history is not None:
            self.state.history.open(self.progress.step, self.setup.batching.tiles or 1)
        if not self.world.is_main:
            return
        request, step = self.setup.request, self.progress.step
        if self.state.history is None:
            discard_history(self.folder, step)
        started_before = self.setup.run_dir.resume_from or (self.folder / "receipt.json").exists()
        receipt = make_receipt(self.setup, self.state, self.watch.data.digests(), self.step.replica.buckets.describe())
        try:
            request.write(self.folder / "config.yaml")
            receipt.write(self.folder / "receipt.json")
        except OSError as error:
            raise ValueError(f"cannot write to {self.folder}: {error.strerror}; choose another --out") from None
        receipt.show()
        resumed = step if started_before else None
        console = trackers.Console(self.setup.batching.n_steps, step, load=partial(load_text, self.world.device))
        self.trackers = trackers.Trackers({"the console": lambda: console})  # for messages about the others
        settings, same = request.flat(), self._same_in_validation
        run_id = receipt.facts["run_id"]
        makers = trackers.for_run(self.config.run, self.folder, console, settings, resumed, same, run_id)
        self.trackers = trackers.Trackers(makers, self.say)
        self._record(f"step {step} of {self.setup.batching.n_steps}, {self.world.size} rank(s)")
        for note in receipt.notes:
            self._record(f"note: {note}")

    def _same_in_validation(self, name: str) -> bool:
        """Return whether a metric is the same quantity as what training logs under that name."""
        return not isinstance(self.recipe, Evaluates) or name in self.recipe.same_as_training()

    def say(self, text: str) -> None:
        """Print a message once, on rank 0, and append it to log.txt."""
        if self.world.is_main:
            self.trackers.message(text)
            self._record(text)

    def _record(self, text: str) -> None:
        with suppress(OSError), (self.folder / "log.txt").open("a", errors="surrogateescape") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _log(self) -> None:
        """Log the values of the steps since the last log, and check that the ranks agree."""
        self.step.confirm()
        self._write_history()
        values = self.step.loss_sums.means(self.world)
        self.world.activity.device_steps.clear()
        now, step, batching = time.perf_counter(), self.progress.step, self.setup.batching
        scale = self.precision.scaler.scale.item() if self.precision.scaler else None
        times = self.times.collect()
        weight = f"{self.step.normalizer.weight_per_sample or 0:.9g}"
        self.check_ranks(times=times, lr=self.update.lr, scale=scale, weight_per_sample=weight)
        values |= {
            **self.update.values(),
            **batching.epochs(step),
            "samples_per_second": batching.samples(step - self._logged_step) / (now - self._logged_at),
            "skipped_steps": int(self.update.bad_steps),
            "epochs_proven": self.watch.ledger.complete,
            "watch_seconds": self.watch.seconds,
            "failed_outputs": self.sampler.failures,
        }
        if self.setup.spot_check_every or self.watch.corruptions:
            values["corruptions"] = self.watch.corruptions
        measured, notes = self.times.record(step, self.watch.times, now - self._logged_at)
        self.trackers.log(step, values | measured)
        for note in notes:
            self.say(note)
        self._check_bad_steps()
        if self.world.is_main and (failure := self.checkpoints.failure()):
            self.say(failure)
        self._logged_at, self._logged_step = time.perf_counter(), step

    def _write_history(self) -> None:
        """Write the digests of the steps since the last time."""
        if self.state.history is not None:
            self.state.history.write()
            if failure := self.state.history.failure():
                self.say(failure)

    def _check_bad_steps(self) -> None:
        self.bad_steps.check(self.progress.step, self.setup.batching.n_steps, self.step.samples_of, self.say)

    def check_ranks(self, everything: bool = False, times: Times | None = None, **facts: float | str | None) -> None:
        """Raise OutOfLockstep unless the ranks agree in all tensors, in the samples used and in `facts`."""
        used, self.step.samples_used = self.step.samples_used, []
        for note in self.watch.check(self.progress.step, used, everything, times, **self.progress.facts(), **facts):
            self.say(note)

    @contextmanager
    def _between_steps(self, phase: str) -> Iterator[None]:
        """Mark the block as a phase of its own, and leave its time out of samples per second."""
        started = time.perf_counter()
        try:
            with self.world.activity.during(phase):
                yield
        finally:
            self._logged_at += time.perf_counter() - started

    def _evaluate(self) -> None:
        """Compute metrics on the validation set, from the averaged weights if there are any; equal on every rank."""
        if self.setup.validation is None:
            return
        self.step.confirm()
        emas, run = self.state.emas, self.config.run
        with self._between_steps(activity.EVALUATION), emas[0].applied() if emas else nullcontext():
            values = self._metrics()
        self.metrics = values
        self.trackers.log(self.progress.step, {f"val/{name}": value for name, value in values.items()})
        if run.best_metric not in values and not self.setup.every("eval"):
            return
        if run.best_metric not in values:  # though the evaluation before the first step had it
            self._save_at_end(final=False)
            raise ValueError(unknown_metric(run.best_metric, values))
        self.progress.evaluated(values[run.best_metric], run.best_mode, run.min_delta)
        self.update.schedule.evaluated(self.progress.bad_evaluations)

    def _metrics(self, limit: int | None = None) -> dict[str, float]:
        """Return the metrics on the validation set, or on its first `limit` samples."""
        batch_size = 2 * self.setup.batching.micro_batch
        if self.setup.request.smoke:
            limit = limit or 2 * batch_size * self.world.size
        with self.evaluator.shown(f"step {self.progress.step}: evaluation", self.trackers.status, after=5.0):
            return self.evaluator.evaluate(self.setup.validation, batch_size, limit)[0]

    def _check_length(self) -> None:
        """Raise a ValueError if the run that is resumed is longer than what is asked for."""
        step, n_steps, checkpoints = self.progress.step, self.setup.batching.n_steps, self.folder / "checkpoints"
        if step > n_steps and not self.setup.request.smoke:
            raise ValueError(
                f"the run to resume is at step {step:,}, and --n_steps or --epochs ask for {n_steps:,}; give a longer "
                f"one, or --resume one of the checkpoints before in {checkpoints} with another --out"
            )

    def _check_best_metric(self) -> None:
        """Raise a ValueError if evaluations do not have the metric that decides which checkpoint is best."""
        name, known = self.config.run.best_metric, not isinstance(self.recipe, Evaluates)
        if self.setup.validation is None or not self.setup.every("eval") or (name == "loss" and known):
            return
        with self.world.activity.during(activity.EVALUATION):
            check_metric(name, self._metrics, self.world.size)

    def _sample_and_score(self, at_end: bool = False) -> None:
        """Write the sample sets and scores that are due, by all ranks."""
        step = self.progress.step
        with self._between_steps(activity.SAMPLING):
            if self._is_due("sample") or (at_end and self.setup.every("sample")):
                self.step.confirm()
                files = self.sampler.sample(step)
                for name, path in ((name, path) for name, paths in files.items() for path in paths):
                    self.trackers.media(step, f"samples/{name}", path)
                self.sample_files = tuple(path for paths in files.values() for path in paths)
            every = self.recipe.score_every if isinstance(self.recipe, Scores) else 0
            if every and (step % every == 0 or (at_end and step >= every)):
                self.step.confirm()
                values, note = self.sampler.score(step)
                self.trackers.log(step, values)
                self.sampler.record_score(step, values)
                if note:
                    self.say(note)

    def _save(self, final: bool = False) -> None:
        """Copy everything off the device and write it in the background. Every rank calls this."""
        self.step.confirm()
        self._write_history()
        if self.state.history is not None:
            self.state.history.flush()
        self.check_ranks(everything=True)  # what is saved is right, and the ledger is at the step of the weights
        self._check_bad_steps()  # a run that is stopped before its next log would not say it
        started = time.perf_counter()
        is_best, numbers = self.progress.new_best, self.state.numbers()
        self.progress.new_best = False
        if not self.world.is_main:
            if self.rank_files is not None:
                self.rank_files.follow(self.state.pieces())
            return
        shards = self.rank_files.of(self.state.pieces()) if self.rank_files is not None else None
        tensors = self.state.capture()[0] if shards is None else {}
        batching = self.setup.batching
        facts = {"global_batch": batching.global_batch, "world": self.world.size, "dataset": batching.dataset}
        state = {**facts, "seed": self.config.data.seed, **numbers}
        self.checkpoints.save(self.progress.step, tensors, state, best=is_best, final=final, shards=shards)
        pause = time.perf_counter() - started
        self.trackers.log(self.progress.step, {"checkpoint_pause_seconds": pause})

    def _save_at_end(self, final: bool) -> None:
        """Save, with a second try; if that fails too, the run has failed on all ranks."""
        failure, best = None, self.progress.new_best
        for _ in range(2):
            self.progress.new_best = best  # also of the second try
            self._save(final)
            if self.world.is_main:
                self.checkpoints.wait()
                failure = self.checkpoints.failure()
                if failure and self.checkpoints.written == self.progress.step:
                    self.say(failure)
                    failure = None
            failure = self.world.broadcast(failure)
            if failure is None:
                return
        raise NotSaved(f"the state after step {self.progress.step} could not be saved: {failure}")

    def _finish(self, stopped_by: str | None) -> Outcome:
        """Save, write the weights as plain files, make the last samples, and free the wrapped model."""
        done = stopped_by in (None, "patience")
        with self.world.activity.during(activity.SAVING):
            if self.progress.step > self.resumed_step:
                self._save_at_end(done)
            if self.state.history is not None and self.world.is_main:
                self.say(self.state.history.summary(self.progress.step))
            if done:
                self._export()
        if done:
            self._unless_stopped("the last samples and scores", partial(self._sample_and_score, at_end=True))
        self.times.finish(self.progress.step)
        self.step.close()
        return Outcome(self.progress.step, self.folder, self.model, self.metrics, stopped_by, self.sample_files)

    def _export(self) -> None:
        try:
            self.state.export(self.folder if self.world.is_main else None, self.setup.request.recipe.name)
        except Exception as error:  # torch and safetensors raise errors of their own where the disk is full
            raise NotSaved(
                f"training is complete, but the weights could not be written to {self.folder} ({error}); "
                f"--resume {self.folder} writes them from the last checkpoint"
            ) from None

    def _unless_stopped(self, name: str, work: Callable[[], None]) -> None:
        """Do what comes after the last step; a signal ends it on all ranks, and the run is complete all the same."""
        self.evaluator.stop_requested = lambda: self.signals.received > 0
        self.signals.work = f"this batch of {name}"
        try:
            work()
        except EvaluationStopped:
            by = signal.Signals(self.world.all_reduce_max(self.signals.received)).name
            self.say(f"{by} ended {name}; training is complete, and the model is kept")
