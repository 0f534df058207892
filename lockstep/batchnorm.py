"""BatchNorm where a global batch is cut into pieces: statistics of all ranks together, or of each tile."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .activity import Activity
from .distributed import World


class _Sum(torch.autograd.Function):
    """A sum over ranks whose gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, activity: Activity) -> Tensor:
        ctx.activity, tensor = activity, tensor.clone(memory_format=torch.contiguous_format)
        with activity.waiting():
            dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.activity), None


class _Normalize(torch.autograd.Function):
    """BatchNorm over all ranks in torch's own kernels: separate operations pass over memory several times as often."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, activity: Activity
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(x, activity)
        ctx.save_for_backward(x, weight, bias, mean, variance, count)
        ctx.eps, ctx.activity = eps, activity
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of gradients, as in a gradient penalty
            y = _composed(x, weight, bias, ctx.eps, ctx.activity)
            return (*torch.autograd.grad(y, (x, weight, bias), grads[0], create_graph=True), None, None)
        local, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.cat([of_weight, of_bias])
        with ctx.activity.waiting():
            dist.all_reduce(sums)
        along, straight = (sums / count).chunk(2)  # the part of the gradient that moves variance, and mean
        inverse = (variance + ctx.eps).rsqrt()
        slope = -weight * inverse.square() * along
        offset = -weight * inverse * straight - slope * mean
        local.addcmul_(x, slope.view(_channels(x))).add_(offset.view(_channels(x)))
        return local, of_weight, of_bias, None, None


def _statistics(x: Tensor, activity: Activity) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and number of the values of each channel, over all ranks."""
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = torch.full((1,), x.numel() / x.shape[1], dtype=mean.dtype, device=x.device)
    table = mean.new_zeros(dist.get_world_size(), 2 * len(mean) + 1)
    torch.cat([mean, variance, count], out=table[dist.get_rank()])
    with activity.waiting():
        dist.all_reduce(table)  # exact: the other rows are zeros
    means, variances, counts = table[:, : len(mean)], table[:, len(mean) : -1], table[:, -1:]
    count = counts.sum(0)
    shares = counts / count
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), count


def _composed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, activity: Activity) -> Tensor:
    """Return what `_Normalize` does, in operations that can be differentiated any number of times."""
    others = [d for d in range(x.dim()) if d != 1]
    count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
    sums = _Sum.apply(torch.cat([x.sum(others), count]), activity)
    count = sums[-1].detach()
    centred = x - (sums[:-1] / count).view(_channels(x))
    variance = _Sum.apply(centred.square().sum(others), activity) / count
    y = centred * (variance + eps).rsqrt().view(_channels(x))
    return y * weight.view(_channels(x)) + bias.view(_channels(x))


def _channels(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of all ranks' samples together, on any backend, whatever each rank holds.

    torch's own has no CPU kernel. Statistics take one small all-reduce, and so do their gradients.
    """

    def __init__(self, *arguments: Any, activity: Activity | None = None):
        super().__init__(*arguments)
        self.activity = activity or Activity()
        """Where the time spent waiting for other ranks is counted."""

    def _check_input_dim(self, input: Tensor) -> None:
        _check_input_dim(input)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return self._local(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        affine = self.weight is not None
        weight = self.weight.to(x.dtype) if affine else x.new_ones(self.num_features)
        bias = self.bias.to(x.dtype) if affine else x.new_zeros(self.num_features)
        y, mean, variance, count = _Normalize.apply(x, weight, bias, self.eps, self.activity)
        self._track(mean, variance, count)
        return y.to(input.dtype)

    def _local(self, input: Tensor) -> Tensor:
        by_batch = self.training or self.running_mean is None
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, by_batch, momentum, self.eps
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_mean += rate * (mean - self.running_mean)
        self.running_var += rate * (unbiased - self.running_var)


class TileBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of one tile; `TileStatistics` brings those of all tiles into the running ones."""

    tile_mean: Tensor
    tile_var: Tensor

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.register_buffer("tile_mean", torch.zeros(self.num_features), persistent=False)
        self.register_buffer("tile_var", torch.zeros(self.num_features), persistent=False)

    def _check_input_dim(self, input: Tensor) -> None:
        _check_input_dim(input)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training or self.running_mean is None:
            mean, var, momentum = self.tile_mean, self.tile_var, 1.0
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, momentum, self.eps)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class TileStatistics:
    """The running statistics of every TileBatchNorm: they take the tiles in the order of the stream."""

    def __init__(self, model: nn.Module, tiles: int, world: World):
        self.world = world
        self.layers = [m for m in model.modules() if isinstance(m, TileBatchNorm) and m.track_running_stats]
        self.table = torch.zeros(tiles, 2 * sum(m.num_features for m in self.layers), device=world.device)
        """A row for each tile: the means, then the variances, of all layers. A rank fills the rows of its tiles."""
        fixed = bool(self.layers) and all(m.momentum is not None for m in self.layers)
        self._fixed = self._rates(0) if fixed else None

    def start_step(self) -> None:
        self.table.zero_()
        self._reset()

    def _reset(self) -> None:
        """Mark all layers as not used, by a variance of -1; a NaN would stay, since a layer multiplies it by 0."""
        if self.layers:
            torch._foreach_zero_([m.tile_mean for m in self.layers])
            torch._foreach_zero_([m.tile_var for m in self.layers])
            torch._foreach_sub_([m.tile_var for m in self.layers], 1)

    def record(self, tile: int) -> None:
        """Keep what the layers have seen in the tile that was just run."""
        if self.layers:
            seen = [m.tile_mean for m in self.layers] + [m.tile_var for m in self.layers]
            torch.cat(seen, out=self.table[tile])
            self._reset()

    @torch.no_grad()
    def finish_step(self, skipped: Tensor) -> None:
        """Update the running statistics, unless the step was skipped."""
        if not self.layers:
            return
        self.world.sum(self.table)  # exact: the rows of other ranks' tiles are zeros
        running: list[Tensor] = [m.get_buffer(name) for name in ("running_mean", "running_var") for m in self.layers]
        old = new = torch.cat(running)
        for tile, row in enumerate(self.table):
            variances = row[len(row) // 2 :]
            unused = torch.cat([variances, variances]) < 0  # a layer in evaluation mode, or not called
            rates = self._rates(tile) if self._fixed is None else self._fixed
            new = torch.where(unused, new, torch.lerp(new, row, rates))
        new = torch.where(skipped, old, new)
        torch._foreach_copy_(running, list(new.split([len(r) for r in running])))
        first = list(itertools.accumulate((m.num_features for m in self.layers), initial=0))[:-1]
        used = (self.table[:, self.table.shape[1] // 2 :][:, first] >= 0).sum(0)
        for layer, count in zip(self.layers, used, strict=True):
            layer.get_buffer("num_batches_tracked").add_(torch.where(skipped, 0, count))

    def _rates(self, tile: int) -> Tensor:
        """Return how far each running value moves towards that of a tile."""
        rates = [
            m.tile_mean.new_full((m.num_features,), m.momentum)
            if m.momentum is not None
            else (1.0 / (m.get_buffer("num_batches_tracked") + tile + 1)).to(m.tile_mean).expand(m.num_features)
            for m in self.layers
        ]
        return torch.cat([*rates, *rates])


def _check_input_dim(input: Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"BatchNorm takes (samples, channels, ...), not {input.dim()} dimension(s)")


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def replace_batch_norm(model: nn.Module, new: Callable[..., _BatchNorm]) -> None:
    """Replace each BatchNorm by `new(features, eps, momentum, affine, tracked)`; names and weights stay."""
    for name, child in list(model.named_children()):
        if isinstance(child, _BatchNorm):
            tracked = child.track_running_stats
            other = new(child.num_features, child.eps, child.momentum, child.affine, tracked)
            other._parameters, other.training = child._parameters, child.training
            other._buffers |= child._buffers
            setattr(model, name, other)
        else:
            replace_batch_norm(child, new)
