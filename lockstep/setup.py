"""What the settings become on this rank: recipe, data, model, optimizer, precision; built once, before step 1."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from . import batchnorm, checkpoint, optim, precision
from .batching import Batching
from .checkpoint import Checkpoint
from .config import Optim, RunFacts, TrainConfig
from .distributed import World
from .evaluate import samples_of
from .exact import Exactness, ExactSums, choose_kernels, compare_environments, environment
from .flags import Request
from .loader import size_of
from .loss import Normalizer, Objective
from .optim import Ema
from .precision import Precision
from .recipe import AfterStep, Alternates, Generates, Recipe, Schedules, SeveralTerms
from .rundir import RunDir
from .sharding import FullySharded, Shares
from .sharding.blocks import recompute
from .sharding.build import make_meta_model, make_model
from .state import Progress, TrainState
from .turns import check_optimizers
from .watch import Watch
from .watch.data import DataWatch
from .watch.history import History
from .watch.ledger import Ledger


@dataclass
class Setup:
    """What does not change while a run trains; only `batching` does, when a rank is out of memory."""

    request: Request
    world: World
    run_dir: RunDir
    recipe: Recipe
    data: Any
    """The training set."""
    validation: Any | None
    batching: Batching
    precision: Precision
    compiled: bool
    sync_bn: bool
    """Whether BatchNorm has the statistics of all ranks."""
    different_kernels: list[str]
    """Of an exact run: what the bits of a kernel depend on and is not the same on all ranks (GPU, versions)."""
    fully: FullySharded | None = None
    """With --shard full: the objective whose parameters are spread over the ranks."""
    recomputed: str | None = None
    """What backward recomputes, if anything."""

    @property
    def config(self) -> TrainConfig:
        return self.request.train

    @property
    def sharded(self) -> str | None:
        """What --shard spreads over the ranks; None for nothing, as on a single rank."""
        return is_sharded(self.config, self.world)

    def whole_model(self) -> AbstractContextManager[None]:
        """Within it, this rank has all of a sharded model; every rank enters it together."""
        return self.fully.whole() if self.fully else nullcontext()

    @property
    def in_tiles(self) -> bool:
        """Whether gradients are summed exactly, tile by tile; one tile in all needs no sum."""
        return (self.batching.tiles or 1) > 1

    def every(self, what: str) -> int:
        """Return the steps between two times that `eval`, `save` or `sample` is due; 0 for never."""
        return self.batching.every(getattr(self.config.run, f"{what}_every"))

    @property
    def same_parameters(self) -> bool:
        """Whether the same parameters get gradients in every step, on every rank, as DDP expects."""
        return not (isinstance(self.recipe, Alternates) or self.config.hardware.find_unused_parameters)

    @property
    def spot_check_every(self) -> int:
        """The steps between two spot checks; 0 for none: one rank, or ranks on which a tile has different bits."""
        possible = self.in_tiles and self.world.size > 1 and not self.different_kernels and self.sharded != "full"
        return self.config.hardware.spot_check_every if possible else 0

    def normalizer(self) -> Normalizer:
        term_counts = self.recipe.term_counts if isinstance(self.recipe, SeveralTerms) else None
        return Normalizer(term_counts, self.world, self.batching, self.config.data.seed, self.precision.dtype)

    def after_step(self) -> Callable[[nn.Module], None] | None:
        """Return what the recipe does to the model after each update, if anything."""
        if not isinstance(self.recipe, AfterStep):
            return None
        change = torch.no_grad()(self.recipe.after_step)
        return self.fully.following(change) if self.fully else change

    def facts(self, own_optimizer: bool) -> RunFacts:
        has_validation_set = self.validation is not None
        return RunFacts(
            world_size=self.world.size,
            local_rank=self.world.local_rank,
            on_cpu=self.world.device.type == "cpu",
            has_agent="TORCHELASTIC_RUN_ID" in os.environ,
            evaluates=has_validation_set and self.every("eval") > 0,
            has_validation_set=has_validation_set,
            generates=isinstance(self.recipe, Generates) and bool(self.recipe.sample_sets()),
            own_optimizer=own_optimizer,
            without_ddp=not self.same_parameters,
            own_schedule=isinstance(self.recipe, Schedules),
        )


def is_sharded(config: TrainConfig, world: World) -> str | None:
    """Return what --shard spreads over the ranks; None for nothing, as on a single rank."""
    return config.hardware.shard if config.hardware.shard != "none" and world.size > 1 else None


def _plan(
    request: Request, recipe: Recipe, size: int | None, world: World, run_dir: RunDir, saved: Checkpoint | None
) -> Batching:
    """Return how the data are cut, with the global batch and the tiles of the run that is resumed."""
    config, resumed_global_batch = request.train, saved.state["global_batch"] if saved else run_dir.global_batch
    in_a_row = recipe.steps_per_batch if isinstance(recipe, Alternates) else 1
    batching = Batching.plan(config.data, size, world.size, resumed_global_batch, request.smoke, in_a_row)
    before = saved.state.get("exact") if saved else None
    if config.hardware.exact:
        tiles = -(-batching.global_batch // config.data.batch_size)
        return batching.in_tiles(before["tiles"] if before else run_dir.tiles or tiles)
    if before:
        run_dir.notes.append("the run was exact up to its last checkpoint, and no longer is: give --exact")
    return batching


def _check_sharding(recipe: Recipe, config: TrainConfig, world: World) -> None:
    if is_sharded(config, world) and isinstance(recipe, Alternates):
        raise ValueError(
            f"--shard {config.hardware.shard} is for recipes with one optimizer, and in this one several take turns: "
            "use --shard none"
        )
    if is_sharded(config, world) and config.hardware.find_unused_parameters:
        raise ValueError(f"give --shard {config.hardware.shard} or --find_unused_parameters, not both")


def prepare(request: Request, world: World, run_dir: RunDir) -> tuple[Setup, TrainState, Watch]:
    """Build everything of a run, restored from its checkpoint if it resumes one."""
    config, seed = request.train, request.train.data.seed
    chosen = precision.choose(config.hardware, world.device)
    saved = checkpoint.load(run_dir.resume_from) if run_dir.resume_from else None
    torch.manual_seed(seed)  # a data set that is drawn when it is made must be the same on every rank
    recipe = request.instance or request.recipe(request.options)
    recipe.optim = config.optim
    if request.smoke:
        recipe.smoke()
    _check_sharding(recipe, config, world)
    data, validation = recipe.dataset("train"), recipe.dataset("val")
    data_watch = DataWatch(world, {"train": samples_of(data), "val": samples_of(validation)}, seed)
    run_dir.notes.extend(data_watch.compare_splits())
    if data is None:
        raise ValueError("the recipe has no training set: dataset('train') returned None")
    size = size_of(data)
    batching = _plan(request, recipe, size, world, run_dir, saved)
    recipe.n_steps, recipe.step = batching.n_steps, torch.zeros((), dtype=torch.int64, device=world.device)

    torch.manual_seed(seed)
    model, source = _make_model(recipe, config, world, chosen, run_dir, saved is None)
    recomputed = config.hardware.activation_checkpointing
    blocks = recompute(model, recomputed) if recomputed != "none" else 0
    sync_bn = _sync_batch_norm(model, config, batching, world)
    compiled = _is_compiled(config, world, sync_bn)
    exactness, different = None, list[str]()
    if config.hardware.exact:
        choose_kernels(True, world.device, compiled)
        exactness, different = _exactness(batching.tiles or 1, world, chosen, _graphs(config, world, compiled), saved)
    setup = Setup(request, world, run_dir, recipe, data, validation, batching, chosen, compiled, sync_bn, different)

    setup.recomputed = f"activations in {blocks} block(s), {recomputed}" if blocks else None
    if setup.sharded == "full":
        setup.fully = _shard_fully(setup, model, source)
    update = _update(setup, model)
    if setup.sharded:
        update.shard(setup.fully or Shares(model, world))
    emas = [Ema(model, decay, update.sharding) for decay in config.optim.ema_decay]
    progress, ledger = Progress.start(config.run.best_mode), Ledger(size or 0)
    every = config.hardware.history_every if exactness and not setup.fully else 0
    history = History(world, run_dir.path, model, every, batching) if every else None
    state = TrainState(model, update, emas, ledger, progress, exactness, history)
    if setup.in_tiles:
        sum_exactly(setup, state)
    own = batchnorm.has_batch_norm(model) and not (sync_bn or setup.in_tiles)
    own_statistics = set(dict(model.named_buffers())) if own else set()
    record = exactness.record if exactness else lambda _: None
    watch = Watch(
        world, lambda everything: state.replicated(own_statistics, everything), ledger, data_watch,
        config.hardware.on_corruption, record,
    )  # fmt: skip
    if saved:
        _check_same_run(saved, seed, size)
        state.restore(saved)
    return setup, state, watch


def _make_model(
    recipe: Recipe, config: TrainConfig, world: World, chosen: Precision, run_dir: RunDir, new_run: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Return the model on its device; with --shard full on the meta device, and on rank 0 another one with values."""
    if is_sharded(config, world) != "full":
        return make_model(recipe, new_run, run_dir.notes.append).to(world.device, chosen.dtype), None
    model, source = make_meta_model(recipe, new_run, run_dir.notes.append, world)
    torch.manual_seed(config.data.seed)  # only rank 0 has drawn initial weights
    return model.to(chosen.dtype), source


def _shard_fully(setup: Setup, model: nn.Module, source: nn.Module | None) -> FullySharded:
    """Spread the model over the ranks."""
    _check_every_micro_batch_has_samples(setup.batching, setup.world, "--shard full")
    tiles, ranks = setup.batching.tiles, setup.world.size
    if tiles and tiles % ranks:
        raise ValueError(
            f"--exact --shard full needs as many tiles on each rank: the global batch is cut into {tiles}, which "
            f"{ranks} ranks cannot share evenly; start another number of ranks, or use --shard optimizer"
        )
    if tiles and batchnorm.has_batch_norm(model):
        raise ValueError("--exact --shard full does not take a model with BatchNorm; use --shard optimizer")
    sharded = FullySharded(Objective(setup.recipe.loss, model, setup.config.data.seed), setup.world, bool(tiles))
    sharded.fill(source)
    return sharded


def _check_every_micro_batch_has_samples(batching: Batching, world: World, what: str) -> None:
    if batching.global_batch // world.size < batching.accumulation:
        raise ValueError(f"{what} needs a sample in every micro-batch: raise --batch_size")


def _graphs(config: TrainConfig, world: World, compiled: bool) -> str:
    """Return what is compiled as one graph: with sharding or recomputing, kernels are others."""
    hardware = config.hardware
    unit = ", by blocks" if is_sharded(config, world) == "full" else ""
    recomputing = (
        f", {hardware.activation_checkpointing} recomputed" if hardware.activation_checkpointing != "none" else ""
    )
    return f"{compiled}{unit}{recomputing}" if compiled else "False"


def _exactness(
    tiles: int, world: World, chosen: Precision, compiled: str, saved: Checkpoint | None
) -> tuple[Exactness, list[str]]:
    """Return what the bits of an exact run depend on and what has broken them already; and where ranks differ."""
    own = environment(world) | {"precision": chosen.name, "compiled": compiled}
    exactness, different = compare_environments(tiles, own, world)
    if saved and "exact" not in saved.state:
        exactness.breaks.append(f"the steps up to {saved.state['progress']['step']} were not exact")
    return exactness, different


def sum_exactly(setup: Setup, state: TrainState) -> None:
    """Let a run sum its gradients exactly, tile by tile; BatchNorm then has the statistics of a tile."""
    if setup.fully is None:
        batchnorm.replace_batch_norm(state.model, batchnorm.TileBatchNorm)
        state.model.to(setup.world.device)
    state.sums = sums = ExactSums((p for p in state.model.parameters() if p.requires_grad), setup.world)
    if setup.fully is not None:
        setup.fully.sum_exactly(sums, (setup.batching.tiles or 1) // setup.world.size)


def _check_same_run(saved: Checkpoint, seed: int, dataset: int | None) -> None:
    for name, value in (("seed", seed), ("dataset", dataset)):
        if saved.state[name] != value:
            raise ValueError(
                f"{saved.path} was made with {name} {saved.state[name]}, not {value}: the order of samples would change"
            )


def _sync_batch_norm(model: nn.Module, config: TrainConfig, batching: Batching, world: World) -> bool:
    if config.hardware.exact:
        return False
    wanted = {"auto": world.size > 1, "on": True, "off": False}[config.hardware.sync_bn]
    if not wanted or not batchnorm.has_batch_norm(model):
        return False
    _check_every_micro_batch_has_samples(batching, world, "BatchNorm over ranks")
    batchnorm.replace_batch_norm(model, partial(batchnorm.SyncBatchNorm, activity=world.activity))
    return True


def _is_compiled(config: TrainConfig, world: World, sync_bn: bool) -> bool:
    wanted = config.hardware.compile
    if sync_bn and world.size > 1:
        if wanted == "on":
            raise ValueError(
                "a model whose BatchNorm is synchronised over ranks is not compiled: two NCCL ranks were seen to train "
                "it differently; use --compile off, or --sync_bn off"
            )
        return False
    return {"auto": world.device.type == "cuda", "on": True, "off": False}[wanted]


def _update(setup: Setup, model: nn.Module) -> optim.Update:
    settings = setup.config.optim
    if settings.schedule == "plateau" and (setup.validation is None or not setup.every("eval")):
        raise ValueError("--schedule plateau follows the evaluations: it needs --eval_every and a validation set")
    optimizers, own = _optimizers(setup.recipe, settings, model)
    ratio = optim.scaled_lr(settings, setup.batching.global_batch) / settings.lr if settings.lr else 1.0
    lr_factor = setup.recipe.lr_factor if isinstance(setup.recipe, Schedules) else None
    schedule = optim.Schedule(settings, setup.batching, lr_factor)
    update = optim.Update(optimizers, schedule, ratio, settings.clip_grad, setup.precision.scaler, setup.world.device)
    update.own_optimizer = own
    return update


def _optimizers(recipe: Recipe, settings: Optim, model: nn.Module) -> tuple[Mapping[str, torch.optim.Optimizer], bool]:
    """Return the optimizers by name, and whether the recipe has built them itself."""
    if isinstance(recipe, Alternates):
        return check_optimizers(recipe, recipe.optimizers(model), model), True
    own = optim.check_optimizer(recipe.optimizer(model))
    return {"": own or optim.build(settings, model.parameters())}, own is not None
