"""Events: what the probes record of one rank, a dataclass for each kind."""

from dataclasses import dataclass, field
from typing import Literal, dataclass_transform

from .source import Site

KINDS: dict[str, "type[Event]"] = {}


@dataclass_transform(field_specifiers=(field,))
@dataclass
class Event:
    """What all kinds have in common, filled in by the recorder. Every subclass is made a dataclass."""

    t: float = field(default=0.0, kw_only=True)  # seconds since the epoch
    at: Site | None = field(default=None, kw_only=True)  # the innermost line of the user's code

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = dataclass(cls)


# -- the process ------------------------------------------------------------------------------------------------------
class Start(Event):
    environment: dict[str, str]
    shares_gpu: bool = False  # whether the audit put all ranks on one GPU


class End(Event):
    """The script ended, by itself or with an exception."""

    status: int
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0


class StepLimit(Event):
    """The rank has taken as many steps as the audit watches."""


class ProbeFailed(Event):
    probe: str
    error: str


class RanksStarted(Event):
    """The script starts ranks itself, all at once or one by one."""

    n: int  # how many, with those before


class ProcessStarted(Event):
    """A process that is no rank."""


class InitGroup(Event):
    world: int  # as the script gives it, to init_process_group or in the environment; -1 if it does not


class Device(Event):
    op: str  # use: a tensor or module is moved to it; device_ids: DDP is given it; set_device; framework
    index: int


class Environment(Event):
    """The script sets a variable of its environment."""

    name: str
    value: str
    before: str | None = None  # what the user had set


# -- calls: entered, and left with a Return ---------------------------------------------------------------------------
class Reduced(Event):
    """What an all-reduce of few numbers outside of the training loop gave."""

    values: list[float]


class PaddingDropped(Event):
    """A library gathers results of an evaluation and leaves out those of samples that fill up the last batch."""


class Collective(Event):
    op: str
    by_library: bool = False  # whether it is called by a library, not by the user's code
    group: list[int] | None = None  # the ranks of its group; None: all. Empty if it is not known.
    group_name: str = ""
    in_thread: bool = False  # whether it is called outside of the main thread
    shape: list[int] | None = None
    dtype: str | None = None
    root: int | None = None
    members: list[int] | None = None  # the ranks of the group that new_group makes


class Forward(Event):
    """The forward pass of DDP or FSDP."""

    training: bool
    syncs: bool | None = None  # whether DDP synchronises gradients in its backward pass; None: this is FSDP


class Backward(Event):
    scaled: bool = False  # whether the loss was multiplied or divided last, other than by a gradient scaler
    divided_by: list[float] = field(default_factory=list)  # numbers, the last first


class Return(Event):
    """The innermost call is left, or has raised an exception."""


# -- training ---------------------------------------------------------------------------------------------------------
class ModelInput(Event):
    """What the n-th forward pass of training is given."""

    n: int
    rows: int = 0
    hashes: str = ""  # of the first samples, packed
    generator: int | None = None  # a checksum of the random generator's state, if the model has dropout


class InputChanged(Event):
    """A tensor was written to between forward and backward."""

    name: str
    shape: list[int]


class OptimizerInit(Event):
    n: int


class ZeroGrad(Event):
    pass


class Step(Event):
    """The n-th step of an optimizer."""

    optimizer: int
    n: int
    lr: list[float]
    backwards: int = 1  # backward passes since its step before
    stale: bool = False  # whether the gradients of the step before were not cleared
    prints: int = 0
    waits: list[tuple[str, int, str]] = field(default_factory=list)  # for the device: file, line, method of Tensor
    unused_search_empty: bool | None = None  # whether find_unused_parameters found none; None: DDP does not search
    unmoved: float | None = None  # share of bfloat16 weights with a gradient that this step left as they were
    clipped_before_sum: bool = False  # whether collectives carried as much as all gradients after these were clipped
    devices: list[str] = field(default_factory=list)  # of the optimizer's parameters. These five: in step 1 only.
    fp16_weights: bool = False
    keeps_state: bool = True  # whether the optimizer has state now
    without_gradients: bool = False  # whether none of its parameters has a gradient
    not_in_model: bool = False  # whether none of its parameters is one of a module that runs
    not_wrapped: list[str] = field(default_factory=list)  # parameters that no wrapper synchronises, though there is one
    no_gradient_yet: list[str] | None = (
        None  # parameters without one in any step so far; None: not checked in this step
    )
    not_optimized: list[str] = field(default_factory=list)  # parameters with a gradient that are in no optimizer


class Weights(Event):
    """Checksums of an optimizer's parameters after its n-th step; 0: before the first."""

    optimizer: int
    n: int
    checksums: dict[str, int]
    averaged: bool = False  # whether collectives since the step carried as much as all of them hold


class StepStart(Event):
    """What the n-th step of an optimizer begins with, as checksums. Only of runs that are compared."""

    optimizer: int
    n: int
    weights: dict[str, int]
    moments: dict[str, int]  # the optimizer's state
    generators: dict[str, int]


class LossValue(Event):
    """The loss of a backward pass that begins. Only of runs that are compared."""

    value: float


class SchedulerStep(Event):
    metric: float | None = None  # of ReduceLROnPlateau
    scheduler: int = 0
    horizon: int | None = None  # after how many steps it has come to its end, if it says that


class AverageChanged(Event):
    """A model that no optimizer has is another than in the backward pass before."""

    average: int
    between: bool  # whether the optimizer has not stepped since then


class AverageRead(Event):
    """The weights of a model that may be an average are read, for the first time since the last step."""

    average: int
    is_use: bool  # whether it is no update of the average


# -- wrappers ---------------------------------------------------------------------------------------------------------
class DDPInit(Event):
    n: int


class FSDPInit(Event):
    pass


class TensorParallel(Event):
    ranks: list[int]  # those that hold parts of one layer


class Join(Event):
    """torch.distributed.algorithms.Join is entered."""


class SeldomAveraged(Event):
    """A library is told to average the weights every so many steps, in place of the gradients in each."""

    period: int


class MovedAfterWrapping(Event):
    """A model inside DDP is moved to another device."""

    source: str
    target: str


class WrapperBypassed(Event):
    """A module inside DDP is called directly, not through DDP."""


class Buffers(Event):
    """The buffers of a DDP module before its n-th forward pass."""

    ddp: int
    n: int
    checksums: dict[str, int]
    local_norms: list[str] = field(default_factory=list)  # BatchNorm layers that use the statistics of this rank only


class UnusedParameters(Event):
    """DDP raises an error, since parameters had no gradient in the backward pass before."""

    names: list[str]


class NoSync(Event):
    """no_sync() is left: what ran inside."""

    backwards: int
    forwards: int


# -- data -------------------------------------------------------------------------------------------------------------
class PassStart(Event):
    """A DataLoader is iterated."""

    loader: int
    epoch: int  # how many times this loader was iterated so far
    dataset: int  # which data set, without the Subsets around it
    type: str
    is_stream: bool = False
    size: int | None = None
    is_subset: bool = False
    sampled: int | None = None  # samples that the sampler gives to this rank
    drop_last: bool = False
    subset: list[int] | None = None  # the indices of a Subset in the whole data set, if they are not too many
    batch_size: int | None = None
    batches: int | None = None
    workers: int = 0
    start_method: str | None = None
    sampler: str | None = None
    in_order: bool = False  # whether nothing shuffles
    has_set_epoch: bool = False


class TrainingMode(Event):
    """The first forward pass in training mode, without gradients, on the batches of a pass."""

    loader: int
    epoch: int
    layers: list[str]  # that work differently in evaluation


class Batch(Event):
    loader: int
    epoch: int
    rows: int
    grad_enabled: bool = True
    index: list[int] = field(default_factory=list)  # of its samples in the whole data set; empty: not known
    hashes: str = ""  # one for each sample, packed
    parts: list[str] = field(default_factory=list)  # the same for each tensor of the batch, of the first samples
    labels: list[int] = field(default_factory=list)  # which of these tensors hold one integer for each sample
    loading: float = 0.0  # seconds spent in loaders since the batch before


class PassEnd(Event):
    loader: int
    epoch: int


class SamplerOrder(Event):
    """A DistributedSampler is iterated."""

    epoch: int
    shuffle: bool


class Fetch(Event):
    n: int
    worker: int | None = None
    drawn: dict[str, int] = field(default_factory=dict)  # generators that were drawn from, with checksums before


class RandomDraw(Event):
    """The n-th random tensor of a step."""

    step: int
    n: int
    function: str
    shape: list[int]
    checksum: int


# -- precision --------------------------------------------------------------------------------------------------------
class Autocast(Event):
    dtype: str


class Scaler(Event):
    """A method of a GradScaler is called."""

    op: str
    n: int
    scale: float | None = None  # after update()


class Clip(Event):
    of_shards: bool = False  # whether the norm is that of the rank's own shards


# -- files and logs ---------------------------------------------------------------------------------------------------
class Save(Event):
    path: str
    existed: bool
    keys: list[str]  # the first names of weights
    prefixed: bool  # whether weights have the prefix of DDP


class CheckpointSaved(Event):
    """Weights were written to a file, after so many steps. Only of runs that are compared."""

    steps: int


class Load(Event):
    path: str
    progress: list[str]  # keys of the checkpoint that tell how far training was
    has_optimizer: bool
    module: Literal["torch", "json", "dcp"] = "torch"  # that loaded it; dcp: torch.distributed.checkpoint


class Move(Event):
    source: str


class LoadStateDict(Event):
    target: Literal["model", "optimizer"]
    empty: bool = False  # whether an optimizer has no state after it


class Print(Event):
    """The first print of a step."""


class Scalar(Event):
    """SummaryWriter.add_scalar."""

    tag: str
    value: float
    folder: str
    step: int | None = None
