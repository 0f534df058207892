"""The diffusion transformer: patches in, a velocity field out, conditioned on time and class.

    model = build("DiT-S/2", side=32, classes=10)
    v = model(x, t, label)                       # x, v: (n, 3, S, S); t: (n,) in [0, 1]; label: (n,) int64

The label `model.none` stands for no class. Each block is steered by shifts, scales and gates computed from the
condition (adaLN-zero): all of them start at zero, so a new model is the identity inside and answers zero.

Legend: n samples, L tokens, D width, H heads, p patch size, S pixels a side.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 3
_FREQUENCY_FEATURES = 256
_PERIOD = 10_000.0
_TIME_SCALE = 1000.0


class Size(NamedTuple):
    width: int
    depth: int
    heads: int


SIZES = {
    "Nano": Size(128, 4, 4),
    "Ti": Size(192, 12, 3),
    "S": Size(384, 12, 6),
    "B": Size(768, 12, 12),
    "L": Size(1024, 24, 16),
    "XL": Size(1152, 28, 16),
}
PATCHES = (2, 4, 8)
NAMES = tuple(f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES)


def parse(name: str) -> tuple[Size, int]:
    """The size and the patch size that a name such as DiT-S/2 stands for."""
    if name not in NAMES:
        raise ValueError(f"model is one of {', '.join(NAMES)}, not {name!r}")
    size, _, patch = name.removeprefix("DiT-").partition("/")
    return SIZES[size], int(patch)


def build(
    name: str, *, side: int, classes: int, registers: int = 0, qk_norm: bool = False, depth: int | None = None
) -> "DiT":
    """The model of that name, freshly initialised, or one of another depth."""
    (width, blocks, heads), patch = parse(name)
    return DiT(
        width, depth or blocks, heads, patch=patch, side=side, classes=classes, registers=registers, qk_norm=qk_norm
    )


def sincos_positions(width: int, rows: int) -> Tensor:
    """(rows², width): sines and cosines of the row in one half of the features, of the column in the other."""
    rate = _PERIOD ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * rate
    line = torch.cat([angle.sin(), angle.cos()], dim=1)  # (rows, width / 2)
    row, column = line[:, None].expand(-1, rows, -1), line[None].expand(rows, -1, -1)
    return torch.cat([row, column], dim=-1).reshape(rows * rows, width).to(torch.get_default_dtype())


def frequency_features(t: Tensor) -> Tensor:
    """(n, 256) cosines and sines of the time at geometrically falling rates, in the precision of `t`."""
    half = _FREQUENCY_FEATURES // 2
    exponent = torch.arange(half, device=t.device, dtype=t.dtype) / half
    angle = t[:, None] * _TIME_SCALE * torch.exp(-math.log(_PERIOD) * exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class HeadNorm(nn.RMSNorm):
    """RMS norm whose gain follows the type of its input, which autocast decides: only then it is one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = HeadNorm(width // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(width // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (n, H, L, D / H)
        # Autocast may widen the norms' answers; attention wants one type.
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, qk_norm: bool):
        super().__init__()
        # No gain of their own: the modulation scales.
        self.norm1 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads, qk_norm)
        self.norm2 = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, width: int, features: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, features)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.out(modulate(self.norm(x), shift, scale))


def to_patches(x: Tensor, p: int) -> Tensor:
    """(n, 3, S, S) to (n, L, 3·p·p), row by row."""
    return x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_image(patches: Tensor, p: int, side: int) -> Tensor:
    """(n, L, 3·p·p) back to (n, 3, S, S)."""
    grid = patches.unflatten(2, (CHANNELS, p, p)).unflatten(1, (side // p, side // p))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class DiT(nn.Module):
    positions: Tensor

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        *,
        patch: int,
        side: int,
        classes: int,
        registers: int = 0,
        qk_norm: bool = False,
    ):
        super().__init__()
        if side % patch:
            raise ValueError(f"the side of the images is a multiple of the patch size {patch}, not {side}")
        self.patch = patch
        self.none = classes
        self.patchify = nn.Linear(CHANNELS * patch * patch, width)
        self.register_buffer("positions", sincos_positions(width, side // patch), persistent=False)
        self.time = nn.Sequential(nn.Linear(_FREQUENCY_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads, qk_norm) for _ in range(depth))
        self.final = FinalLayer(width, CHANNELS * patch * patch)
        self._initialise()
        # Last, so that a model with registers draws the same initial weights as the one without.
        self.registers = nn.Parameter(torch.randn(registers, width) * 0.02) if registers else None

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.label.weight, std=0.02)
        for layer in self.time:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        zeroed = [self.final.modulation, self.final.out]
        zeroed += [module.modulation for module in self.blocks if isinstance(module, Block)]
        for linear in zeroed:
            nn.init.zeros_(linear.weight)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        tokens = self.patchify(to_patches(x, self.patch)) + self.positions
        patches = tokens.shape[1]
        if self.registers is not None:
            tokens = torch.cat([tokens, self.registers.expand(len(x), -1, -1).to(tokens.dtype)], dim=1)
        # Every modulation begins with the same SiLU: it is computed once.
        condition = F.silu(self.time(frequency_features(t)) + self.label(label))
        for block in self.blocks:
            tokens = block(tokens, condition)
        return to_image(self.final(tokens[:, :patches], condition), self.patch, x.shape[-1])
