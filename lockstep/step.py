"""One training step on this rank: `TrainStep.run` is the whole of it, from a global batch to new weights.

In an exact run the host learns a step late whether the gradients fitted their grid, so that no step waits for the
device. A step counts (in averages, logged values and the ledger) once that is known; `confirm` makes sure of it.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from . import loader
from .batching import MicroBatch, Position
from .exact import Numbered
from .hashing import GOLDEN_GAMMA
from .loss import ExactLossSums, Finished, LossSums, Objective, sums_and_weights
from .outcome import OutOfMemory
from .parallel import Replica, Tiles, Wire, explain
from .recipe import Alternates
from .setup import Setup, sum_exactly
from .state import TrainState
from .stream import Slice, Stream
from .turns import Turns
from .watch import Watch
from .watch.data import digest
from .watch.draws import recording_draws
from .watch.history import StepNumbers
from .watch.spot import Schedule, SpotChecks
from .watch.stragglers import StepTimes

OUT_OF_MEMORY = 1000
"""A stop request more urgent than any signal's number."""


class TrainStep:
    """The step, and what it runs on: stream, loader, replica."""

    def __init__(
        self,
        setup: Setup,
        state: TrainState,
        watch: Watch,
        times: StepTimes,
        say: Callable[[str], None],
    ):
        self.setup, self.state, self.watch, self.times, self.say = setup, state, watch, times, say
        self.world, self.precision, self.seed = setup.world, setup.precision, setup.config.data.seed
        batching = setup.batching
        self.stream: Stream | None = None
        """None where the data set is iterable: it is read in its own order."""
        if batching.dataset is not None and not loader.is_iterable(setup.data):
            costs, in_a_row = setup.recipe.sample_costs(setup.data), batching.steps_per_batch
            self.stream = Stream(batching.dataset, batching.global_batch, self.seed, costs, in_a_row)
        self.turns = Turns(setup.recipe, state.model, state.update) if isinstance(setup.recipe, Alternates) else None
        self.normalizers = {name: setup.normalizer() for name in state.update.optimizers}
        self.normalizer = next(iter(self.normalizers.values()))
        self.loss_sums = ExactLossSums() if setup.config.hardware.exact else LossSums()
        self.samples_used: list[Slice] = []
        """Since the last check of the ledger."""
        self.after_step = setup.after_step()
        self.unkeyed_draws: list[str] = []
        """What is to be said about random numbers that the loss does not take from `rng`; known with several ranks."""
        self._unconfirmed: tuple[int, list[MicroBatch], list[Finished]] | None = None
        """Of an exact run: the last step, until it is known that its gradients fitted the grid."""
        self._request: int | None = None
        """This rank's stop request in the step that is made, until all ranks have agreed on one."""
        self._answer: Callable[[], int] | None = None
        """What waits for the agreement, once it was asked for."""
        self._per_sample: dict[str, Tensor] | None = None
        """Of the last global batch that was accumulated: what the terms of its loss are divided by."""
        self.build()

    def build(self) -> None:
        """Build what depends on the size of the micro-batch."""
        setup = self.setup
        if self.turns is not None:
            self.turns.end()
        if setup.in_tiles and self.state.sums is None:  # also when memory does not suffice for a run's only tile
            sum_exactly(setup, self.state)
        sums = self.state.sums
        for normalizer in self.normalizers.values():
            normalizer.tiles = setup.batching.tiles
        fully = setup.fully
        objective = fully.objective if fully else Objective(setup.recipe.loss, self.state.model, self.seed)
        self.tiles = Tiles(self.state.model, sums, setup.batching.tiles or 1, self.world) if sums else None
        hardware = setup.config.hardware
        wire = Wire(hardware.bucket_mb, torch.bfloat16 if hardware.grad_compression == "bf16" else None)
        self.replica = Replica(
            objective, self.world, not setup.compiled, self.tiles, fully, wire, setup.same_parameters
        )
        self.replica.buckets.on_ready, self.replica.buckets.on_last = self.times.gradients_ready, self._ask
        if self.world.size > 1:
            self._warm_up()
        if setup.compiled:
            self.replica.compile(exact=setup.config.hardware.exact)
        self.spot = self._spot_checks()
        repeats = self.spot.repeats if self.spot else lambda _: ()
        workers, step = setup.config.data.num_workers, self.state.progress.step
        if self.stream is None:
            self.loader = loader.Loader(self._reader(repeats), self.world, workers, self.precision.dtype)
            return
        requests = loader.requests(self.stream, self.world, setup.batching, step, repeats)
        fetch = loader.Fetch.of(setup.recipe, setup.data, self.seed)
        self.loader = loader.Loader(fetch, self.world, workers, self.precision.dtype, requests)

    def _reader(self, repeats: Callable[[int], Sequence[int]] = lambda _: ()) -> loader.Reader:
        """Return what reads the iterable data set from the next step on."""
        setup, progress = self.setup, self.state.progress
        preparation = loader.Preparation.of(setup.recipe, self.seed)
        first = progress.next_item or Position()
        return loader.Reader(
            setup.data, preparation, setup.batching, self.world.rank, first, digest, progress.step, repeats
        )

    def _spot_checks(self) -> SpotChecks | None:
        sums, every = self.state.sums, self.setup.spot_check_every
        if sums is None or not every:
            return None
        schedule = Schedule(every, self.setup.batching, self.seed)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.state.model.named_parameters()}
        own = [names[parameter] for parameter in sums.parameters]
        return SpotChecks(schedule, self.world, sums, self.watch, own, self._fetch_tile, self.say)

    def _warm_up(self) -> None:
        micro = self._two_samples()
        with recording_draws() as draws:
            for _ in self.turns.each() if self.turns is not None else ("",):
                _, per_sample = self.normalizer.count_terms([micro])
                self.replica.warm_up(micro, per_sample, self.precision.autocast)
        self.unkeyed_draws = draws.notes(self.setup.config.hardware.exact)
        self._discard_gradients()

    def _two_samples(self) -> MicroBatch:
        if self.stream is None:
            return self._to_device(self._reader().collated(range(2), 0))
        samples = self.stream.batch(self.state.progress.step, self.world.rank, self.world.size)
        return self._fetch(Slice(samples.epoch[:2], samples.index[:2]), 0)

    def _fetch(self, samples: Slice, number: int) -> MicroBatch:
        """Return samples as a micro-batch, without the loader."""
        (micro,) = loader.Fetch.of(self.setup.recipe, self.setup.data, self.seed).__getitems__((samples, number, True))
        return self._to_device(micro)

    def _to_device(self, micro: MicroBatch) -> MicroBatch:
        if micro.error:
            raise ValueError(micro.error)
        return loader.to_device(micro, self.world.device, self.precision.dtype)

    def _fetch_tile(self, step: int, number: int) -> MicroBatch:
        """Return any tile of the next step, which is `step`."""
        if self.stream is None:
            return self._to_device(self._reader().collated(self.setup.batching.span(number), number))
        return self._fetch(self.stream.batch(step, number, self.setup.batching.tiles or 1), number)

    def run(self, stop_request: int = 0) -> int:
        """Make one optimizer update from one global batch; return the stop request that all ranks agree on."""
        step, batches = self.state.progress.step, self.loader.step()
        if self.tiles is not None:
            return self._run_exactly(step, list(batches), stop_request, self.tiles)
        self._request = stop_request
        finished = self._accumulate_gradients(step, batches)
        request = OUT_OF_MEMORY if finished is None else stop_request
        agreed = self._agree(request) if self.world.size > 1 else request
        if finished is None or agreed == OUT_OF_MEMORY:
            finished, batches = None, iter(())  # frees the memory of the one, and the loader that the other holds
            return self._redo_with_smaller_micro_batches(stop_request)
        if self.world.size > 1:
            self.times.gradients_summed()
        history = self.state.history
        if history is not None:  # an exact run of one tile
            history.digest_gradients(step + 1)
        self.state.update.step(step, self.normalizer.gradient_factor())
        if history is not None:
            history.digest_weights(step + 1)
            self._record(step, finished)
        if self.after_step is not None:
            self.after_step(self.state.model)
        for ema in self.state.emas:
            ema.update(step)
        self.samples_used += [micro.samples for micro in finished if micro.uses_up]
        self.state.progress.next_item = finished[-1].next_item
        self.loss_sums.add(finished)
        return agreed

    def _ask(self) -> None:
        """Ask for the agreement when this rank has its gradients: it travels with the last of them."""
        if self._request is not None and self._answer is None:
            self._answer = self.world.start_all_reduce_max(self._request)

    def _agree(self, request: int) -> int:
        """Return the most urgent of all ranks' requests."""
        if self._answer is not None and request == OUT_OF_MEMORY:
            raise OutOfMemory("there is not enough memory to sum the gradients; use a smaller --batch_size")
        answer = self._answer or self.world.start_all_reduce_max(request)
        self._request = self._answer = None
        return answer()

    def _accumulate_gradients(
        self, step: int, batches: Iterable[MicroBatch], sync: bool = True, repeated: bool = False
    ) -> list[Finished] | None:
        """Run forward and backward of all micro-batches of a step; None if this rank is out of memory.

        `repeated`: they are tiles that have been counted already; their gradients stay in the parameters.
        """
        finished, self.replica.buckets.issued, turn = list[Finished](), 0, ""
        self.setup.recipe.step.fill_(step)
        if self.turns is not None:
            turn = self.start_turn(step)
        uses_up = (step + 1) % self.setup.batching.steps_per_batch == 0
        tiles, counted = None if repeated else self.tiles, False
        if tiles is not None:
            tiles.start_step()
        try:
            batches, per_sample = self.normalizer.count_terms(batches, local=repeated)
            counted = True
            if not repeated:
                self._per_sample = per_sample
            for micro in batches:
                if not len(micro.indices):
                    continue  # more micro-batches than samples on this rank; never the last one
                if tiles is not None:
                    tiles.start_tile(micro.number)
                first = int(micro.samples.index[0])  # not the rank; for dropout alone, all else is keyed
                self.world.seed_generators(((self.seed * 1_000_003 + step) * GOLDEN_GAMMA + first) % 2**64)
                with nullcontext() if micro.last and sync else self.replica.no_sync():
                    with self.precision.autocast:
                        total, weight, logs = self.replica.forward(
                            micro.batch, micro.epochs, micro.indices, self._per_sample
                        )
                    scale = self.precision.scaler.scale if self.precision.scaler else 1.0
                    loss = self.normalizer.scale(total, weight, micro.number, len(micro.indices), scale)
                    self.replica.backward(loss)
                if tiles is not None:
                    tiles.finish_tile(micro.number, last=micro.last and sync)
                finished.append(Finished(micro.samples, total.detach(), weight, logs, turn, uses_up, micro.next_item))
        except torch.OutOfMemoryError:
            if self.setup.sync_bn:
                raise  # other ranks wait in the middle of a forward pass: no agreement is possible there
            if not counted and self.world.size > 1 and not repeated:  # they wait for this rank's counts
                raise OutOfMemory("no memory for the micro-batches of a step; use a smaller --batch_size") from None
            if self.setup.fully:  # the same
                raise OutOfMemory(
                    f"rank {self.world.rank} has not enough memory for step {step + 1}; resume with a smaller "
                    "--batch_size or --activation_checkpointing blocks (--shard full cannot change that in a run)"
                ) from None
            if sync:
                self.replica.release()
            return None
        except RuntimeError as error:
            if (meaning := explain(error, "give --find_unused_parameters")) is None:
                raise
            raise meaning from None
        return finished

    def start_turn(self, step: int) -> str:
        """Let the optimizer of a step have its turn, where several take turns; return its name."""
        if self.turns is None:
            return ""
        turn = self.turns.start(step)
        self.normalizer = self.normalizers[turn]
        return turn

    def samples_of(self, step: int) -> Slice | None:
        """Return this rank's samples of a step, whose optimizer then has its turn; None if they are read in order."""
        self.start_turn(step)
        return None if self.stream is None else self.stream.batch(step, self.world.rank, self.world.size)

    def _run_exactly(self, step: int, batches: list[MicroBatch], stop_request: int, tiles: Tiles) -> int:
        """Do the same in an exact run. It keeps the batches: the step may have to be done again."""
        if self.spot is not None:
            batches = self.spot.start_step(step, batches)
        accumulate = self._accumulate_gradients if tiles.sums.known else self._measure_then_accumulate
        self._request = stop_request
        finished = accumulate(step, batches)
        request = OUT_OF_MEMORY if finished is None else stop_request
        agreed = self._agree(request) if self.world.size > 1 else request
        if finished is None or agreed == OUT_OF_MEMORY:
            finished = None
            return self._redo_with_smaller_micro_batches(stop_request)
        if self.world.size > 1:
            self.times.gradients_summed()
        if self.confirm():  # the step before was done again: these are the gradients of weights that were replaced
            finished = self._accumulate_again(step, batches)
        tiles.check_buffers()  # before spot checks, which would accuse a rank
        while self.spot is not None and self.spot.check(
            step, partial(self._losses, batches, finished), partial(self._repeat, step)
        ):
            finished = self._accumulate_again(step, batches)
        self._update_exactly(step, tiles)
        self._unconfirmed = step, batches, finished
        if self.after_step is not None:
            self.confirm()  # it may change what the next loss uses
        return agreed

    def _losses(self, batches: list[MicroBatch], finished: list[Finished]) -> list[Tensor]:
        """Return what each tile adds to the loss."""
        return [self.normalizer.numbers(m.number, f) for m, f in zip(batches, finished, strict=True)]

    def _repeat(self, step: int, micro: MicroBatch) -> tuple[Tensor, Numbered] | None:
        """Return what any rank's tile of this step adds to the loss, and its gradients; leave nothing else behind."""
        assert self.tiles is not None
        with self.replica.unchanged(), self.normalizer.unchanged():
            finished = self._accumulate_gradients(step, [micro], sync=False, repeated=True)
            return (self._losses([micro], finished)[0], self.tiles.sums.gradients()) if finished else None

    def _measure_then_accumulate(self, step: int, batches: list[MicroBatch]) -> list[Finished] | None:
        """Make a pass that shows how large gradients are, which gives the first grid; then accumulate."""
        assert self.tiles is not None
        measured = self._accumulate_gradients(step, batches, sync=False)
        if self.world.all_reduce_max(int(measured is None)):
            return None
        self.tiles.sums.set_grid()
        self._discard_gradients()
        return self._accumulate_gradients(step, batches)

    def _accumulate_again(self, step: int, batches: Iterable[MicroBatch]) -> list[Finished]:
        self._discard_gradients()
        finished = self._accumulate_gradients(step, batches)
        if finished is None:
            raise OutOfMemory(f"there is not enough memory to repeat step {step + 1}; use a smaller --batch_size")
        return finished

    def _update_exactly(self, step: int, tiles: Tiles) -> None:
        """Update the weights; the history has digests of the summed gradients before, and of the weights after."""
        overflow, history = tiles.finish_gradients(), self.state.history
        if history is not None:
            history.digest_gradients(step + 1)
        skipped = self.state.update.step(step, self.normalizer.gradient_factor(), overflow)
        tiles.finish_statistics(skipped)
        if history is not None:
            history.digest_weights(step + 1)

    def confirm(self) -> bool:
        """Wait until the last step of an exact run is known to have fitted its grid, or do it again on a coarser one.

        Return whether it was done again. All ranks see the same. In other runs every step counts at once.
        """
        if self._unconfirmed is None or self.tiles is None:
            return False
        (step, batches, finished), self._unconfirmed = self._unconfirmed, None
        again = False
        while self.tiles.sums.overflowed():
            again = True
            finished = self._accumulate_again(step, batches)
            self._update_exactly(step, self.tiles)
        self._record(step, finished, again)
        if self.after_step is not None:
            self.after_step(self.state.model)
        for ema in self.state.emas:
            ema.update(step)
        self.samples_used += [micro.samples for micro in finished if micro.uses_up]
        self.state.progress.next_item = finished[-1].next_item
        self.loss_sums.add(finished)
        return again

    def _record(self, step: int, finished: list[Finished], again: bool = False) -> None:
        """Let a step count in the history; `again`: it was done again on a coarser grid."""
        history, update = self.state.history, self.state.update
        if history is None:
            return
        history.redone_steps += again
        if history.is_due(step + 1):
            tiles = self.setup.batching.tiles or 1
            history.add(step + 1, StepNumbers(update.lr, tiles, sums_and_weights(finished), update.bad_steps))

    def _redo_with_smaller_micro_batches(self, stop_request: int) -> int:
        """Halve the micro-batch on all ranks, because one was out of memory; the global batch stays."""
        old, step = self.setup.batching, self.state.progress.step + 1
        new = old.halved()
        self.confirm()
        self.setup.batching = new
        self.say(new.describe_halving(old, step))
        if self.state.exactness is not None:
            self.state.exactness.cut_tiles(new.tiles or 1, step)
        self._discard_gradients()
        self.replica.close()
        del self.replica, self.loader
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.build()
        return self.run(stop_request)

    def _discard_gradients(self) -> None:
        for parameter in self.state.update.parameters:
            parameter.grad = None
        self.normalizer.reset()

    def close(self) -> None:
        """Free the wrapped model and the loader's processes."""
        self.replica.close()
        if self.turns is not None:
            self.turns.end()
        del self.replica, self.loader
