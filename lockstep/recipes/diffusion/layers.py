"""The parts of a diffusion transformer: patches, positions, time, attention, adaLN-zero blocks.

Each block is steered by shifts, scales and gates computed from the condition (adaLN-zero): all of them start at zero,
so a new model is the identity inside and answers zero.

Legend: n samples, L tokens, D width, H heads, d = D / H, p patch size, S pixels per side.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 3
EPSILON = 1e-6
_PERIOD = 10_000.0
_TIME_FEATURES = 256
_TIME_SCALE = 1000.0

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines (L, d/2) of the angles that queries and keys are rotated by."""


def sincos_positions(width: int, rows: int) -> Tensor:
    """(rows², width): sines and cosines of the row in one half of the features, of the column in the other."""
    rate = _PERIOD ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * rate
    line = torch.cat([angle.sin(), angle.cos()], dim=1)  # (rows, width / 2)
    return _by_row_and_column(line, rows).to(torch.get_default_dtype())


def rotary_angles(features: int, rows: int, before: int = 0) -> Tensor:
    """(before + rows², features / 2) in float64: half of the angles follow the row, half the column.

    The first `before` tokens have no position: their angles are 0.
    """
    rate = _PERIOD ** (-torch.arange(features // 4, dtype=torch.float64) / (features // 4))
    line = torch.arange(rows, dtype=torch.float64)[:, None] * rate
    return F.pad(_by_row_and_column(line, rows), (0, 0, before, 0))


def _by_row_and_column(line: Tensor, rows: int) -> Tensor:
    """(rows², 2·features) from (rows, features): those of the row, then those of the column."""
    row, column = line[:, None].expand(-1, rows, -1), line[None].expand(rows, -1, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of the last axis of (..., L, d) by angles whose cosines and sines are (L, d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)


def frequency_features(t: Tensor) -> Tensor:
    """(n, 256) cosines and sines of the time at geometrically falling rates, in the precision of `t`."""
    half = _TIME_FEATURES // 2
    exponent = torch.arange(half, device=t.device, dtype=t.dtype) / half
    angle = t[:, None] * _TIME_SCALE * torch.exp(-math.log(_PERIOD) * exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def to_patches(x: Tensor, p: int) -> Tensor:
    """(n, 3, S, S) to (n, L, 3·p·p), row by row."""
    return x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_image(patches: Tensor, p: int, side: int) -> Tensor:
    """(n, L, 3·p·p) back to (n, 3, S, S)."""
    grid = patches.unflatten(2, (CHANNELS, p, p)).unflatten(1, (side // p, side // p))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class RMSNorm(nn.RMSNorm):
    """RMS norm whose gain follows the type of its input, which autocast decides: only then it is one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def norm(width: int, gain: bool) -> nn.RMSNorm:
    """RMS norm; without a gain of its own where the modulation scales anyway."""
    return RMSNorm(width, eps=EPSILON) if gain else nn.RMSNorm(width, eps=EPSILON, elementwise_affine=False)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, qk_norm: bool, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = norm(width // heads, gain=True) if qk_norm else nn.Identity()
        self.k_norm = norm(width // heads, gain=True) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (n, H, L, d)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        # Norms under autocast and full-precision angles may widen queries and keys; attention wants one type.
        attended = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention and MLP, each modulated by the condition; `gain`: whether the norms have one of their own."""

    def __init__(self, width: int, attention: Attention, mlp: nn.Module, gain: bool):
        super().__init__()
        self.norm1 = norm(width, gain)
        self.attention = attention
        self.norm2 = norm(width, gain)
        self.mlp = mlp
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, rotation: Rotation | None = None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1), rotation)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, width: int, features: int, gain: bool):
        super().__init__()
        self.norm = norm(width, gain)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, features)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.out(modulate(self.norm(x), shift, scale))


class PatchTransformer(nn.Module):
    """Patches in, patches out, conditioned on time and class; a subclass says what happens between the blocks.

    The label `none` stands for no class.
    """

    positions: Tensor

    def __init__(
        self, patchify: nn.Module, blocks: list[Block], *, width: int, patch: int, side: int, classes: int, gain: bool
    ):
        super().__init__()
        if side % patch:
            raise ValueError(f"the side of the images is a multiple of the patch size {patch}, not {side}")
        self.patch, self.side = patch, side
        self.none = classes
        self.patchify = patchify
        self.register_buffer("positions", sincos_positions(width, side // patch), persistent=False)
        self.time = nn.Sequential(nn.Linear(_TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(blocks)
        self.final = FinalLayer(width, CHANNELS * patch * patch, gain)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.label.weight, std=0.02)
        for layer in self.time:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        modulations = [module.modulation for module in self.blocks if isinstance(module, Block)]
        for linear in [*modulations, self.final.modulation, self.final.out]:
            nn.init.zeros_(linear.weight)

    def tokens(self, x: Tensor) -> Tensor:
        """(n, L, D): the patches of images (n, 3, S, S), with their positions."""
        return self.patchify(to_patches(x, self.patch)) + self.positions

    def condition(self, t: Tensor, label: Tensor) -> Tensor:
        """(n, D) from times (n,) and embedded labels (n, D). Every modulation begins with the same SiLU."""
        return F.silu(self.time(frequency_features(t)) + label)

    def image(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """(n, 3, S, S) from the patches' tokens."""
        return to_image(self.final(tokens, condition), self.patch, self.side)
