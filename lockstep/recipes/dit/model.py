"""The diffusion transformer: patches in, a velocity field out, conditioned on time and class.

    model = build("DiT-S/2", side=32, classes=10)
    v = model(x, t, label)                       # x, v: (n, 3, S, S); t: (n,) in [0, 1]; label: (n,) int64

Register tokens are appended to the patches and dropped before the final layer. Legend: see `diffusion/layers.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..diffusion.layers import CHANNELS, Attention, Block, PatchTransformer


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
    """Return the size and the patch size of a model name such as DiT-S/2."""
    if name not in NAMES:
        raise ValueError(f"model is one of {', '.join(NAMES)}, not {name!r}")
    size, _, patch = name.removeprefix("DiT-").partition("/")
    return SIZES[size], int(patch)


def build(
    name: str, *, side: int, classes: int, registers: int = 0, qk_norm: bool = False, depth: int | None = None
) -> "DiT":
    """Return the model of that name, freshly initialised, or one of another depth."""
    size, patch = parse(name)
    size = size._replace(depth=depth or size.depth)
    return DiT(size, patch=patch, side=side, classes=classes, registers=registers, qk_norm=qk_norm)


class DiT(PatchTransformer):
    def __init__(self, size: Size, *, patch: int, side: int, classes: int, registers: int = 0, qk_norm: bool = False):
        width, depth, heads = size
        super().__init__(
            nn.Linear(CHANNELS * patch * patch, width),
            [Block(width, Attention(width, heads, qk_norm), _mlp(width), gain=False) for _ in range(depth)],
            width=width,
            patch=patch,
            side=side,
            classes=classes,
            gain=False,
        )
        # Last, so that a model with registers draws the same initial weights as the one without.
        self.registers = nn.Parameter(torch.randn(registers, width) * 0.02) if registers else None

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        tokens = self.tokens(x)
        patches = tokens.shape[1]
        if self.registers is not None:
            tokens = torch.cat([tokens, self.registers.expand(len(x), -1, -1).to(tokens.dtype)], dim=1)
        condition = self.condition(t, self.label(label))
        for block in self.blocks:
            tokens = block(tokens, condition)
        return self.image(tokens[:, :patches], condition)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
