"""Everything that one run holds: built, described, captured in a checkpoint and restored from one."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, evaluate, loader, optim, parallel, precision
from .config import Request
from .distributed import World
from .ema import Ema
from .loader import MicroBatch
from .recipe import Objective, Recipe
from .rng import Rng
from .run import Place, Receipt, devices, without_effect
from .stream import Sizes, Slice, Stream
from .watch import Watch


class Job:
    """A recipe, its settings, and what they make on this rank. `trainer.py` has the loop that runs it."""

    def __init__(self, request: Request, world: World, place: Place):
        self.request, self.world, self.place, self.config = request, world, place, request.train
        self.precision = precision.choose(self.config.hardware, world.device)
        start = checkpoint.load(place.start) if place.start else None

        seed = self.config.data.seed
        torch.manual_seed(seed)  # a data set that is drawn when it is made must be the same one on every rank
        self.recipe: Recipe = request.recipe(request.options)
        if request.smoke:
            self.recipe.smoke()
        self.weighs = type(self.recipe).weigh is not Recipe.weigh
        """Whether its loss has several terms."""
        self.data = self.recipe.dataset("train")
        self.validation = self.recipe.dataset("val")
        if self.data is None:
            raise ValueError("the recipe has no training set")
        bound = start.state["global_batch"] if start else place.global_batch
        self.sizes = Sizes.of(request, evaluate.counted(self.data), world.size, bound)
        intervals = {kind: getattr(self.config.run, f"{kind}_every") for kind in ("eval", "save", "sample")}
        self.every = {kind: self.sizes.every(interval) for kind, interval in intervals.items()}

        torch.manual_seed(seed)
        self.model = self.recipe.model()
        if not place.start and (remark := self.recipe.begin(self.model)):
            place.remarks.append(remark)
        self.model.to(world.device, self.precision.dtype)
        self.shares_batch_norm = self._share_batch_norm()
        torch.manual_seed(seed * 1_000_003 + world.rank + 1)  # for dropout alone: all else is keyed
        self.compiled = self._compiles()
        self.emas = [Ema(self.model, decay) for decay in self.config.optim.ema_decay]
        self.update = self._update()
        self.watch = Watch(world, self._replicated(), self.sizes.dataset)

        self.step = self.started = 0
        self.best = math.inf if self.config.run.best_mode == "min" else -math.inf
        self.bad_evaluations = 0
        self.new_best = False
        if start:
            self.restore(start)
        self.stream = Stream(self.sizes.dataset, self.sizes.global_batch, seed, self.recipe.costs(self.data))
        self.prepare()

    def _share_batch_norm(self) -> bool:
        wanted = {"auto": self.world.size > 1, "on": True, "off": False}[self.config.hardware.sync_bn]
        if wanted and parallel.has_batch_norm(self.model):
            if self.sizes.global_batch // self.world.size < self.sizes.accumulation:
                raise ValueError("BatchNorm over ranks needs a sample in every micro-batch: raise --batch_size")
            parallel.share_batch_norm(self.model)
            return True
        return False

    def _compiles(self) -> bool:
        wanted = self.config.hardware.compile
        if self.shares_batch_norm and self.world.size > 1:
            if wanted == "on":
                raise ValueError(
                    "a model whose BatchNorm is shared over ranks is not compiled: two NCCL ranks were seen to train "
                    "it differently; use --compile off, or --sync_bn off"
                )
            return False
        return {"auto": self.world.device.type == "cuda", "on": True, "off": False}[wanted]

    def _replicated(self) -> dict[str, Tensor]:
        """What has to be the same on every rank: all of the state, but for statistics that are a rank's own."""
        state = self.model.state_dict()
        if parallel.has_batch_norm(self.model) and not self.shares_batch_norm:
            own = dict(self.model.named_buffers())
            return {name: tensor for name, tensor in state.items() if name not in own}
        return dict(state)

    def _update(self) -> optim.Update:
        settings = self.config.optim
        optimizer = self.recipe.optimizer(self.model) or optim.build(settings, self.model.parameters())
        ratio = optim.scaled_lr(settings, self.sizes.global_batch) / settings.lr if settings.lr else 1.0
        schedule = optim.Schedule(settings, self.sizes)
        if settings.schedule == "plateau" and (self.validation is None or not self.every["eval"]):
            raise ValueError("--schedule plateau follows the evaluations: it needs --eval_every and a validation set")
        scaler = self.precision.scaler
        return optim.Update(optimizer, schedule, self.sizes, ratio, settings.clip_grad, scaler, self.world)

    def prepare(self) -> None:
        """Make ready what depends on how the global batch is cut: the replica and the loader."""
        objective = Objective(self.recipe, self.model, self.config.data.seed)
        self.replica = parallel.Replica(objective, self.world, self.compiled)
        if self.world.size > 1:
            self._rehearse()
        workers = self.config.data.num_workers
        workers = loader.default_workers(self.world.device) if workers is None else workers
        dtype = self.precision.dtype
        self.loader = loader.Loader(
            self.recipe, self.data, self.stream, self.world, self.sizes, self.step, workers, dtype
        )

    def weighed(self, micros: Iterable[MicroBatch]) -> tuple[list[MicroBatch], dict[str, Tensor]]:
        """The micro-batches of a step, and for a loss of several terms what each is a mean over, by sample."""
        micros, sums = list(micros), dict[str, Tensor]()
        for micro in micros:
            if len(micro.indices):
                rng = Rng.of(self.config.data.seed, micro.epochs, micro.indices)
                for name, count in (self.recipe.weigh(micro.batch, rng) or {}).items():
                    sums[name] = sums.get(name, 0) + count.detach().double()
        # A term without an element anywhere has a total of 0, whatever it is divided by.
        whole = self.world.sum(torch.stack(list(sums.values()))).clamp(min=1) / self.sizes.global_batch
        return micros, dict(zip(sums, whole.to(self.precision.dtype), strict=True))

    def _rehearse(self) -> None:
        """Two passes of two samples, forward and back, that change nothing, for the replica to learn from."""
        piece = self.stream.batch(self.step, self.world.rank, self.world.size)
        first = Slice(piece.epoch[:2], piece.index[:2])
        micro = loader.Fetch(self.recipe, self.data, self.stream.seed).__getitems__((first, True))
        if micro.error:
            raise ValueError(micro.error)
        micro = loader.to_device(micro, self.world.device, self.precision.dtype)
        per_sample = self.weighed([micro])[1] if self.weighs else None
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.train()
        with torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else []):
            for _ in range(2):
                with self.precision.autocast:
                    total, *_ = self.replica.rehearsal(micro.batch, micro.epochs, micro.indices, per_sample)
                (total * 0).backward()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        self.update.forget()

    def receipt(self) -> Receipt:
        settings, sizes, update = self.config.optim, self.sizes, self.update
        full = update.full_lr[0]
        rule = "" if settings.lr_scaling == "none" else f" = {settings.lr:g} scaled {settings.lr_scaling}"
        parameters = sum(p.numel() for p in self.model.parameters())
        rows = [
            ("recipe", f"{self.request.recipe.name}: {self.recipe.describe_model(self.model)}"),
            ("parameters", f"{parameters:,}"),
            ("data", self.recipe.describe_data("train") or f"{sizes.dataset:,} samples"),
            ("devices", devices(self.world)),
            ("world", f"{self.world.size}, backend {self.world.backend}, time-out {self.config.hardware.timeout:g} s"),
            (
                "global batch",
                f"{sizes.micro_batch} micro-batch × {sizes.accumulation} accumulation × {sizes.world} world"
                f" = {sizes.global_batch}",
            ),
            ("length", f"{sizes.n_steps:,} steps = {sizes.n_steps / sizes.steps_per_epoch:.2f} epochs"),
            ("learning rate", f"{full:g}{rule}, {settings.schedule}, {update.schedule.warmup} warm-up steps"),
            ("optimizer", f"{type(update.optimizer).__name__}, averages: {list(settings.ema_decay) or 'none'}"),
            ("precision", f"{self.precision.name}, {'compiled' if self.compiled else 'not compiled'}"),
            ("folder", str(self.place.folder)),
        ]
        if self.place.start:
            rows.append(("resumes", f"{self.place.start} at step {self.step}"))
        has_val, generates = self.validation is not None, bool(self.recipe.galleries())
        remarks = without_effect(self.request, self.world, sizes, has_val and self.every["eval"] > 0, generates)
        if sizes.micro_batch * sizes.accumulation * sizes.world != sizes.global_batch:
            remarks.append("the global batch does not divide evenly: some micro-batches are smaller by one")
        if parallel.has_batch_norm(self.model):
            remarks += self._batch_norm_remarks()
        facts = {"spec": self.request.recipe.spec, "global_batch": sizes.global_batch, "starts": self.place.starts}
        return Receipt(facts, rows, [*self.place.remarks, *remarks])

    def _batch_norm_remarks(self) -> list[str]:
        if self.world.size > 1 and not self.shares_batch_norm:
            return ["BatchNorm has statistics of its own on every rank (--sync_bn off): results depend on the world"]
        notes = []
        if self.shares_batch_norm and self.world.size > 1 and self.world.device.type == "cuda":
            notes.append("not compiled: BatchNorm is shared over the ranks")
        if self.sizes.accumulation > 1:
            notes.append("BatchNorm sees one micro-batch at a time: with accumulation it differs from one large batch")
        return notes

    def capture(self, generators: list[dict[str, Tensor]], bad_steps: int) -> tuple[checkpoint.Tensors, dict[str, Any]]:
        """Everything that changes while it trains; `generators` are those of all ranks."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": checkpoint.optimizer_tensors(self.update.optimizer, names),
            "rng": {f"rank{r}.{kind}": state for r, kinds in enumerate(generators) for kind, state in kinds.items()},
            **{f"ema-{ema.decay}": ema.shadow for ema in self.emas},
        }
        state = {
            "step": self.step,
            "global_batch": self.sizes.global_batch,
            "world": self.world.size,
            "seed": self.config.data.seed,
            "dataset": self.sizes.dataset,
            "optimizer": type(self.update.optimizer).__name__,
            "best": self.best,
            "bad_evaluations": self.bad_evaluations,
            "bad_steps": bad_steps,
            "drops": self.update.schedule.drops,
            "scaler": self.precision.scaler.state() if self.precision.scaler else None,
            "ledger": self.watch.ledger.state(),
        }
        return tensors, state

    def restore(self, start: checkpoint.Checkpoint) -> None:
        """Go on where the checkpoint was made, on whatever world this is."""
        what = str(start.path)
        for name, now in (("seed", self.config.data.seed), ("dataset", self.sizes.dataset)):
            if start.state[name] != now:
                raise ValueError(f"{what} was made with {name} {start.state[name]}, not {now}: it would lose its place")
        checkpoint.restore_model(self.model, start.tensors["model"], what)
        for ema in self.emas:
            averaged = start.tensors.get(f"ema-{ema.decay}")
            if averaged is None:
                raise ValueError(f"{what} has no averages with decay {ema.decay}; give the --ema_decay of its run")
            ema.restore(averaged)
        if start.state["optimizer"] != type(self.update.optimizer).__name__:
            raise ValueError(f"{what} was made with {start.state['optimizer']}; give the --optimizer of its run")
        checkpoint.restore_optimizer(self.update.optimizer, self.model.named_parameters(), start.tensors["optimizer"])
        self.step, state = start.step, start.state
        self.started = self.step
        self.best, self.bad_evaluations = state["best"], state["bad_evaluations"]
        self.update.bad_steps.fill_(state["bad_steps"])
        self.update.schedule.drops = state["drops"]
        self.watch.ledger.restore(state["ledger"])
        if self.precision.scaler and state["scaler"]:
            self.precision.scaler.restore(state["scaler"])
        generators = start.tensors["rng"]
        if f"rank{self.world.rank}.cpu" in generators:
            torch.set_rng_state(generators[f"rank{self.world.rank}.cpu"])
        if f"rank{self.world.rank}.cuda" in generators and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(generators[f"rank{self.world.rank}.cuda"], self.world.device)
