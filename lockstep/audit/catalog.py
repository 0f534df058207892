"""Every finding: its name, how bad it is, why it matters and how it is mended. What is seen where, the judges say."""

from dataclasses import dataclass, field
from textwrap import dedent
from typing import Literal

from .trace import Site

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Kind:
    """What can be wrong."""

    name: str
    topic: int
    """Its chapter in docs/audit.md."""
    severity: Severity
    why: str
    mend: str
    """A few lines of code."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where it was seen."""

    kind: Kind
    what: str
    at: Site | None = None
    evidence: tuple[str, ...] = field(default=())

    @property
    def severity(self) -> Severity:
        return self.kind.severity


KINDS: dict[str, Kind] = {}


def finding(name: str, what: str, at: Site | None = None, *evidence: str) -> Finding:
    return Finding(KINDS[name], what, at, evidence)


def _kind(topic: int, name: str, severity: Severity, why: str, mend: str) -> None:
    KINDS[name] = Kind(name, topic, severity, " ".join(why.split()), dedent(mend).strip())


_kind(
    1, "unsynchronised", "error",
    """Every rank trains a model of its own on its part of the data. Only rank 0's is saved: the work of all others is
    thrown away, and nothing says so.""",
    """
    model = DDP(model)          # keep the wrapper
    loss = criterion(model(x), y)   # call the wrapper, not model.module
    # wrap after the last layer was added; what is trained outside of DDP needs its gradients averaged by hand
    """,
)  # fmt: skip
_kind(
    2, "collective-mismatch", "error",
    """A collective returns when all ranks have called it. Called by some, or paired with another one, it waits for
    ever, or hands one call's data to another.""",
    """
    if rank == 0:
        save(model)
    dist.barrier()              # outside of the branch: every rank comes here
    """,
)  # fmt: skip
_kind(
    2, "hangs", "error",
    "The ranks stopped moving: no progress, no use of the processor, for as long as the audit waits.",
    "# see which line each rank is in, and what it waits for there",
)  # fmt: skip
_kind(
    2, "crashed", "error",
    "The script ended with an error, so that it could be watched only up to there.",
    "# mend the error and audit again",
)  # fmt: skip
_kind(
    3, "uneven-steps", "error",
    """Gradients are averaged over all ranks in every backward pass. A rank that does fewer leaves the others waiting,
    or pairs its gradients with those of another batch.""",
    """
    sampler = DistributedSampler(dataset)       # the same number of batches on every rank
    bad = torch.tensor([float(not loss.isfinite())], device=device)
    dist.all_reduce(bad)                        # skip or stop together, or not at all
    if bad: continue
    """,
)  # fmt: skip
_kind(
    4, "differing-schedule", "error",
    "Ranks that take steps of different size hold different models after the first of them, whatever DDP does.",
    """
    dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)     # gloo: SUM, then divide by the world
    scheduler.step(val_loss)                            # on every rank, with the same value
    """,
)  # fmt: skip
_kind(
    5, "repeated-samples", "error",
    """Ranks that see the same samples do the same work: N GPUs train as one does, at N times the cost, and the
    effective batch is smaller than it looks.""",
    """
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    """,
)  # fmt: skip
_kind(
    5, "unseen-samples", "warning",
    "Part of the data set takes no part in an epoch.",
    "sampler = DistributedSampler(dataset)       # shards that cover the whole set",
)  # fmt: skip
_kind(
    5, "overlapping-splits", "error",
    "The model is tested on samples it was trained on: the metric says more than it knows.",
    """
    train, val = random_split(dataset, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    """,
)  # fmt: skip
_kind(
    5, "differing-splits", "error",
    """Each rank cut the data set in its own way. What one rank keeps for validation another trains on.""",
    """
    train, val = random_split(dataset, [0.9, 0.1], generator=torch.Generator().manual_seed(0))  # same seed everywhere
    """,
)  # fmt: skip
_kind(
    5, "padded-evaluation", "warning",
    """DistributedSampler repeats samples until the set divides by the world. In evaluation they count twice, and the
    metric depends on the number of GPUs.""",
    """
    val = Subset(dataset, range(rank, len(dataset), world))     # no sample twice
    # sum counts over ranks: correct and total, not a mean of means
    """,
)  # fmt: skip
_kind(
    5, "unsharded-stream", "error",
    "An IterableDataset knows nothing of ranks: each of them, and each worker, reads all of it.",
    """
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    part, parts = rank * workers + worker, world * workers
    for n, sample in enumerate(source):
        if n % parts == part: yield sample
    """,
)  # fmt: skip
_kind(
    6, "same-order", "warning",
    "The samples come in the same order, in the same batches, in every epoch.",
    """
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
    """,
)  # fmt: skip
_kind(
    6, "differing-epoch", "error",
    "Ranks that shuffle by different epochs do not divide one permutation: some samples come twice, others never.",
    "sampler.set_epoch(epoch)        # the same number on every rank",
)  # fmt: skip
_kind(
    7, "same-randomness", "warning",
    """Every rank draws the same noise, dropout or augmentation: samples of one global batch are not independent, and
    more ranks do not bring more variety.""",
    "torch.manual_seed(seed + rank)      # after the model is built",
)  # fmt: skip
_kind(
    7, "same-workers", "warning",
    "Loader workers of different ranks, or of one, start from the same seed: augmentations repeat.",
    """
    torch.manual_seed(seed + rank)      # workers are seeded from it; no constant seed in worker_init_fn
    """,
)  # fmt: skip
_kind(
    8, "no-zero-grad", "error",
    "Gradients of all former steps are still there and are added to: the step follows a growing sum of the past.",
    "optimizer.zero_grad(set_to_none=True)       # after every optimizer.step()",
)  # fmt: skip
_kind(
    8, "step-without-backward", "error",
    "The optimizer steps twice along the same gradients.",
    "loss.backward()\noptimizer.step()       # once",
)  # fmt: skip
_kind(
    8, "unscaled-accumulation", "warning",
    "Gradients of several micro-batches are summed, not averaged: the step is as many times too large.",
    "(loss / accumulation_steps).backward()",
)  # fmt: skip
_kind(
    8, "needless-sync", "note",
    "Gradients are sent over the network after every micro-batch, though only the last one's sum is used.",
    """
    with model.no_sync() if not last else nullcontext():
        (model(x) / accumulation_steps).backward()      # forward and backward inside
    """,
)  # fmt: skip
_kind(
    8, "idle-no-sync", "warning",
    "DDP decides in forward whether backward will synchronise. With only backward under no_sync() it has no effect.",
    """
    with model.no_sync():
        loss = criterion(model(x), y)       # the forward pass too
        loss.backward()
    """,
)  # fmt: skip
_kind(
    8, "leaking-accumulation", "warning",
    "The last micro-batches of an epoch fill no step; their gradients wait for the next epoch's first one.",
    "if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):\n    optimizer.step()",
)  # fmt: skip
_kind(
    9, "no-steps", "error",
    "The script ends normally and has trained nothing.",
    "assert len(loader) > 0 and start_epoch < epochs",
)  # fmt: skip
_kind(
    9, "nothing-changed", "error",
    "The optimizer stepped and no weight is different: what is saved is what was initialised.",
    "# learning rate above 0? parameters with requires_grad? gradients that reach them (no detach, no_grad)?",
)  # fmt: skip
_kind(
    9, "untrained-parameters", "warning",
    "These parameters get gradients, and no optimizer ever uses them: they stay as initialised.",
    "optimizer = AdamW([*backbone.parameters(), *head.parameters()])",
)  # fmt: skip
_kind(
    9, "foreign-parameters", "error",
    "The optimizer holds tensors of a model that is not the one in use; it updates what nobody reads.",
    "model = make_model().to(device)     # replace it before, not after\noptimizer = AdamW(model.parameters())",
)  # fmt: skip
_kind(
    10, "local-batch-norm", "warning",
    """Mean and variance come from each rank's own micro-batch: with few samples a rank the model trained on N GPUs is
    another one than on one, and rank 0's running statistics are saved for all.""",
    "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)      # before DDP",
)  # fmt: skip
_kind(
    10, "drifting-buffers", "warning",
    "Buffers such as running statistics differ between ranks: the saved model is rank 0's, not that of the run.",
    "model = DDP(model)      # with broadcast_buffers=True, the default; or SyncBatchNorm",
)  # fmt: skip
_kind(
    11, "local-metric", "warning",
    """Each rank evaluates its own shard and nothing brings the results together: what is printed, or decides which
    checkpoint is best, is the metric of a part of the set.""",
    """
    counts = torch.tensor([correct, total], device=device)
    dist.all_reduce(counts)
    accuracy = counts[0] / counts[1]
    """,
)  # fmt: skip
_kind(
    11, "differing-logs", "warning",
    "Several ranks log different values under one name; the curve shows whichever was written last.",
    """
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        writer.add_scalar('loss', mean / world, step)
    """,
)  # fmt: skip
_kind(
    12, "no-gradient", "warning",
    "These parameters take no part in the loss: they are never trained, and DDP has to look for them.",
    "# use them in forward, or: for p in unused.parameters(): p.requires_grad_(False)",
)  # fmt: skip
_kind(
    12, "needless-unused-search", "note",
    "DDP walks the whole graph after every forward pass to find unused parameters; there are none.",
    "model = DDP(model)      # without find_unused_parameters=True",
)  # fmt: skip
_kind(
    13, "fp16-without-scaler", "warning",
    "Small gradients become zero in fp16. Without a scaler the model learns less, and nothing says so.",
    "scaler = torch.amp.GradScaler('cuda')       # or dtype=torch.bfloat16, which needs none",
)  # fmt: skip
_kind(
    13, "scaler-with-bf16", "note",
    "bf16 has the range of fp32; a scaler costs a wait for the device in every step and can only skip steps.",
    "loss.backward()\noptimizer.step()        # no scaler",
)  # fmt: skip
_kind(
    13, "rebuilt-scaler", "warning",
    "A new scaler starts at its first scale again: the steps in which it finds its way are skipped every time.",
    "scaler = torch.amp.GradScaler('cuda')       # once, before the first epoch; saved in the checkpoint",
)  # fmt: skip
_kind(
    13, "clipped-before-unscaling", "error",
    "The norm that is clipped is that of the scaled gradients, tens of thousands of times too large.",
    "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)",
)  # fmt: skip
_kind(
    14, "several-writers", "error",
    "Several ranks write one file, each when it comes to it; what is left may be a mixture of them.",
    "if rank == 0:\n    torch.save(state, path)\ndist.barrier()",
)  # fmt: skip
_kind(
    14, "prefixed-checkpoint", "warning",
    "Keys that begin with `module.` load only into a wrapped model; strict=False loads nothing and says nothing.",
    "torch.save(model.module.state_dict(), path)",
)  # fmt: skip
_kind(
    14, "in-place-checkpoint", "warning",
    "The checkpoint is overwritten where it is: a run that is killed while writing has lost it.",
    "torch.save(state, path + '.tmp')\nos.replace(path + '.tmp', path)",
)  # fmt: skip
_kind(
    14, "forgotten-optimizer", "warning",
    "The run goes on with fresh optimizer state: momenta and step counts are lost, and the loss jumps.",
    "optimizer.load_state_dict(checkpoint['optimizer'])      # and save it; schedule and scaler too",
)  # fmt: skip
_kind(
    14, "nothing-left-to-train", "error",
    "The checkpoint says that training is over: the script takes no step and ends normally.",
    "if start_epoch >= epochs:\n    raise SystemExit(f'nothing to do: epoch {start_epoch} of {epochs}')",
)  # fmt: skip
_kind(
    15, "scaled-lr", "warning",
    "The rate was multiplied by the world, but the global batch is what it was: the step is that much too large.",
    "lr = base_lr * (batch_per_rank * world) / base_batch",
)  # fmt: skip
_kind(
    16, "changed-inputs", "warning",
    "Forward writes into its inputs or labels: what is computed from them afterwards is computed from something else.",
    "labels = torch.where(labels == 255, 0, labels)      # a new tensor, not labels[labels == 255] = 0",
)  # fmt: skip
_kind(
    17, "shared-device", "error",
    "All ranks work on one GPU; the others are idle.",
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
)  # fmt: skip
_kind(
    17, "wrong-device", "error",
    "DDP was given another device than the one the rank works on.",
    """
    local = int(os.environ['LOCAL_RANK'])
    torch.cuda.set_device(local)
    model = DDP(model.cuda(), device_ids=[local])
    """,
)  # fmt: skip
_kind(
    18, "waits", "note",
    "The step waits for the device here: the GPU runs dry until Python has caught up.",
    "total += loss.detach()      # on the device; total.item() once in a while",
)  # fmt: skip
_kind(
    18, "starved", "note",
    "The loop spends its time loading data, in the process that should feed the device.",
    "DataLoader(dataset, num_workers=8, pin_memory=True, persistent_workers=True)",
)  # fmt: skip
_kind(
    18, "all-ranks-log", "note",
    "Every rank prints in every step: the same lines N times, mixed.",
    "if rank == 0:\n    print(...)",
)  # fmt: skip
_kind(
    19, "dead-setting", "warning",
    "Nothing reads this variable. What it was meant to set has its default.",
    "dist.init_process_group('nccl', timeout=timedelta(minutes=30))",
)  # fmt: skip
_kind(
    19, "overwritten-setting", "warning",
    "The script overwrites what its user set in the environment.",
    "os.environ.setdefault('WANDB_MODE', 'online')",
)  # fmt: skip
