"""Your own training loop on one rank or many: `Run` has the data, the gradients, the checkpoints and the checks.

    def main(world):
        model = Net().to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        run = lockstep.Run(world, "runs/mine", model=model, optimizer=optimizer)      # resumes what is there
        for x, y in run.batches(train_set, global_batch=64, n_steps=1000):
            total = F.cross_entropy(model(x), y, reduction="sum")
            run.backward(total, weight=len(y))         # the gradient of the mean over the global batch
            optimizer.step()
            optimizer.zero_grad()

    if __name__ == "__main__":
        with lockstep.world() as world:
            main(world)

`python script.py` is one rank, `torchrun --nproc_per_node=4 script.py` four, with the same result up to rounding.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from . import activity, checkpoint, config, rundir
from .accumulation import Accumulation, LossOf, check_exact
from .distributed import World
from .evaluate import dataset_size, share
from .exact import choose_kernels, compare_environments, environment, kernels_restored
from .feed import Feed, Step
from .gradients import Gradients
from .loader import Preparation, to_device
from .outcome import NotSaved, Stopped
from .registered import Registered, numbers
from .rng import Rng
from .stop_signals import StopSignals
from .watch import Watch

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, Rng], Any]

_LEFT = "the step was left before its last micro-batch; take all micro-batches of each step"


class Run:
    """A training run in a loop of your own: data, gradients, checkpoints and checks, each of which may be used alone.

    `folder`: where checkpoints go; a run that is there is resumed, on any number of ranks. None: nothing is saved.
    `objects`: whatever has `state_dict` and `load_state_dict`: models, optimizers, schedules, scalers, averages. All of
    it is saved and restored, and compared over the ranks. Models start from rank 0's weights, their BatchNorm has the
    statistics of all ranks, and their gradients are what `backward` sums.
    `exact`: `accumulate` sums gradients without rounding, so that any number of ranks trains the same bits.
    """

    def __init__(
        self,
        world: World,
        folder: str | Path | None = None,
        *,
        seed: int = 0,
        exact: bool = False,
        save_every: int = 1000,
        check_every: int = 50,
        keep: int = 3,
        **objects: Any,
    ):
        config.check(save_every >= 1, "save_every is at least 1 step", save_every)
        config.check(check_every >= 1, "check_every is at least 1 step", check_every)
        self.world, self.seed, self.save_every, self.check_every = world, seed, save_every, check_every
        self.step = 0
        """Steps done; inside the loop, the number of the current one, counted from 0."""
        if exact:
            check_exact(objects)
        self.registered = Registered(objects, world)
        self.gradients = Gradients(self.registered.parameters(), world)
        self.feed, self.signals = Feed(world, seed, self._say), StopSignals(self._say)
        self.checkpoints: checkpoint.Checkpoints | None = None
        self._closing = ExitStack()
        world.closing.callback(self.close)
        self.accumulation = Accumulation(self.gradients, self.registered, exact)
        if exact:
            self._closing.enter_context(kernels_restored())
            choose_kernels(True, world.device, compiled=False)
            self.feed.exactness, _ = compare_environments(0, environment(world), world)
        if folder is not None:
            try:
                self._open(Path(folder), keep)
            except BaseException:
                self.close()
                raise

    def _open(self, folder: Path, keep: int) -> None:
        """Lock the folder, and restore the run that is there."""
        wanted = config.Run(out=str(folder), resume="auto")
        run_dir = self._closing.enter_context(rundir.open_run_dir(wanted, folder.name, self.world))
        self.world.folder = run_dir.path
        for note in run_dir.notes:
            self._say(note)
        if self.world.is_main:
            self.checkpoints = checkpoint.Checkpoints(run_dir.path / "checkpoints", keep)
            self._closing.callback(self.checkpoints.wait)
        if run_dir.resume_from:
            saved = checkpoint.load(run_dir.resume_from)
            if "objects" not in saved.state:
                raise ValueError(f"{run_dir.path} holds a run of a recipe; give the Run another folder")
            self.feed.load_state_dict(saved.state["feed"])
            self.registered.restore(saved)
            self.step = saved.step
            self._say(f"resumed {run_dir.path} after step {self.step}")
            self._resume_exactly(saved)

    def _resume_exactly(self, saved: checkpoint.Checkpoint) -> None:
        """Go on with the tiles and the grids of an exact run, and say what has broken it."""
        before, own = saved.state.get("exact"), self.feed.exactness
        if own is None:
            if before:
                self._say("the run was exact up to its last checkpoint, and no longer is: give exact=True")
            return
        if before is None:
            own.record(f"the steps up to {saved.step} were not exact")
        else:
            own.tiles = before["tiles"]
            own.load_state_dict(before)
            self.accumulation.restore(saved.tensors.get("exact", {}))
        for broken in own.breaks:
            self._say(f"not the bits of a run without this: {broken}")

    def _say(self, text: str) -> None:
        if self.world.is_main:
            sys.stderr.write(f"lockstep: {text}\n")

    def batches(
        self,
        dataset: Any,
        global_batch: int,
        *,
        n_steps: int | None = None,
        epochs: int | None = None,
        collate: Collate = default_collate,
        augment: Augment | None = None,
        workers: int | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of each global batch, collated and on its device, until the run has so many steps.

        Lengths count from the start of the run: one that is resumed, and a second call, go on where it was. The data
        set is map-style, and shuffled anew in every epoch; or iterable, and read in its own order. `augment(item, rng)`
        changes single items. After each step the ranks are compared and the run is saved when that is due, and at the
        end; a signal (Ctrl-C, a scheduler's) saves it and raises `Stopped` on all ranks.
        """
        for step in self.steps(
            dataset, global_batch, n_steps=n_steps, epochs=epochs, collate=collate, augment=augment, workers=workers
        ):
            yield from step

    def steps(
        self,
        dataset: Any,
        global_batch: int,
        *,
        batch_size: int | None = None,
        n_steps: int | None = None,
        epochs: int | None = None,
        collate: Collate = default_collate,
        augment: Augment | None = None,
        workers: int | None = None,
    ) -> Iterator[Step]:
        """Yield, for each step, an iterator over this rank's micro-batches of up to `batch_size` samples.

        This is `batches` with gradient accumulation: call `backward` for each micro-batch, and the optimizer once. Or
        give the step to `accumulate`, which does it again where that is necessary.
        """
        length = config.Data(batch_size or global_batch, global_batch, n_steps=n_steps, epochs=epochs)
        preparation = Preparation(self.seed, collate, augment)
        batching = self.feed.open(dataset, length, preparation, workers, self.step)
        if self.registered.has_batch_norm() and batching.accumulation > global_batch // self.world.size:
            raise ValueError("BatchNorm over ranks needs a sample in every micro-batch: raise batch_size")
        now = self.world.activity
        now.step = self.step
        now.enter(activity.FIRST_STEP)
        with self.signals:
            while self.step < batching.n_steps:
                step = Step(self.feed, self.step)
                try:
                    yield step
                except GeneratorExit:  # the loop was left by break, mostly after the work of this step
                    if self.gradients.complete:
                        self._count_step()
                    raise
                if step.untouched:  # else its samples would be those of the next step
                    raise ValueError(_LEFT)
                self.end_step(at_end=self.step + 1 == batching.n_steps)
        self.feed.micro = None
        now.enter(activity.CLOSING)

    @property
    def rng(self) -> Rng:
        """The randomness of the samples in hand, one key each: the same on any number of ranks."""
        return self.feed.rng

    def shard(
        self, dataset: Any, batch_size: int = 256, *, collate: Collate = default_collate, workers: int = 0
    ) -> Iterator[Any]:
        """Yield this rank's part of a data set, in order, each sample once over all ranks: for exact metrics.

        Add up sums with `world.sum`; collect what does not add up with `world.gather_rows`, in the data set's order.
        """
        own = Subset(dataset, share(dataset_size(dataset), self.world))
        loader = DataLoader(own, batch_size, collate_fn=collate, num_workers=workers, generator=torch.Generator())
        with self.world.activity.during(activity.EVALUATION):
            for batch in loader:
                yield to_device(batch, self.world.device)
                self.world.activity.marks += 1

    def backward(self, total: Tensor, weight: float | Tensor, name: str = "loss") -> None:
        """Add to `.grad` the gradient of the mean loss: `total` over `weight`, each summed over the global batch.

        `total` is the sum over the elements of this micro-batch, `weight` how many there are (samples, tokens, pixels
        that have a label). With several losses in a step, each has a `name`. Every rank calls this equally often.
        """
        self.gradients.backward(total, weight, name, self.feed.batching, self.feed.micro)

    def accumulate(self, step: Step, loss: LossOf, name: str = "loss") -> None:
        """Add to `.grad` the gradient of the mean of a loss over a step of `steps`; every rank calls this.

        `loss(batch)` returns (total, weight) of a micro-batch, as for `backward`. It is called for each micro-batch,
        and again where the step has to be done again: so it changes nothing that is kept.
        """
        self.accumulation.run(step, loss, name)

    def means(self) -> dict[str, float]:
        """Return the mean of each loss since the last call, over all ranks; every rank calls this."""
        return self.gradients.means()

    def end_step(self, at_end: bool = False) -> None:
        """Count a step; save and compare the ranks when that is due; raise Stopped on all ranks after a signal.

        `batches` and `steps` call this. Call it yourself in a loop over a loader of your own, and put that loop into
        `with run.signals:` if it is to be stopped by signals.
        """
        if self.feed.micro is not None and not self.feed.micro.last:
            raise ValueError(_LEFT)
        self._count_step()
        self.world.activity.finish_step(self.step, self.world.device.type == "cuda")
        stop_request = self.world.all_reduce_max(self.signals.received)
        stopped = bool(stop_request) and not at_end
        if at_end or stopped or self.step % self.save_every == 0:
            with self.world.activity.during(activity.SAVING):
                self.save(wait=at_end or stopped)
        elif self.step % self.check_every == 0:
            self.check()
        if stopped:
            raise self._stopped(signal.Signals(stop_request))

    def _count_step(self) -> None:
        self.gradients.end_step()
        self.feed.count_step()
        self.step += 1

    def _stopped(self, by: signal.Signals) -> Stopped:
        where = "nothing is saved, as the Run has no folder"
        if self.checkpoints is not None:
            where = f"everything is saved in {self.world.folder}: the same command goes on from there"
        self._say(f"stopped by {by.name} after step {self.step}; {where}")
        return Stopped(by)

    def check(self, everything: bool = False) -> None:
        """Raise OutOfLockstep on all ranks unless they hold the same weights and have used each sample once.

        `everything`: compare all that is registered, not the models alone.
        """
        facts, used = self.feed.facts, self.feed.used
        if everything:
            facts = facts | numbers(self.registered.capture()[1], "the state")
        self.feed.used = []
        watch = Watch(self.world, self.registered.replicated, self.feed.ledger, self.feed.data_watch)
        with self.world.activity.during(activity.LOGGING):
            notes = watch.check(self.step, used, everything, **facts)
        self.world.activity.device_steps.clear()
        if self.checkpoints is not None and (failure := self.checkpoints.failure()):
            notes.append(failure)
        for note in notes:
            self._say(note)

    def save(self, wait: bool = False) -> None:
        """Compare everything over the ranks, and write a checkpoint in the background. Every rank calls this.

        `wait`: until it is written; if it could not be, NotSaved is raised on all ranks.
        """
        self.check(everything=True)
        if self.checkpoints is not None:
            tensors, outlines = self.registered.capture()
            state = {"feed": self.feed.state_dict(), "objects": outlines}
            if self.feed.exactness is not None:
                state["exact"], tensors["exact"] = self.feed.exactness.state_dict(), self.accumulation.tensors()
            self.checkpoints.save(self.step, {n: group for n, group in tensors.items() if group}, state)
        if wait and (failure := self.world.broadcast(self._write_failure())):
            raise NotSaved(f"the state after step {self.step} could not be saved: {failure}")

    def _write_failure(self) -> str | None:
        if self.checkpoints is None:
            return None
        self.checkpoints.wait()
        failure = self.checkpoints.failure()
        return failure if self.checkpoints.written != self.step else None

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the folder. Leaving the world does so too."""
        self._closing.close()
