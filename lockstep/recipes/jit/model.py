"""The just-image transformer: a noisy image in, the clean image out, on raw patches.

    model = build("JiT-B/16", side=256, classes=1000)
    x = model(z, t, label)                       # z, x: (n, 3, S, S); t: (n,) in [0, 1], 1 is clean; label: (n,) int64

A patch goes through a bottleneck (two linear maps, the first to few features) before it becomes a token. From block
`start` on, class tokens stand before the patches; they are dropped at the end. Positions enter twice: fixed sines and
cosines are added to the tokens, and queries and keys are rotated by angles that follow row and column (2-D rotary
embedding). Legend: see `diffusion/layers.py`.
"""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..diffusion.layers import CHANNELS, Attention, Block, PatchTransformer, rotary_angles


class Size(NamedTuple):
    width: int
    depth: int
    heads: int
    bottleneck: int
    """Features between the two linear maps from a patch to a token."""
    start: int
    """The block, counted from 0, before which class tokens join."""


SIZES = {
    "Nano": Size(128, 4, 4, 64, 1),
    "Ti": Size(192, 12, 3, 64, 4),
    "S": Size(384, 12, 6, 128, 4),
    "B": Size(768, 12, 12, 128, 4),
    "L": Size(1024, 24, 16, 128, 8),
    "H": Size(1280, 32, 16, 256, 10),
}


def parse(name: str) -> tuple[Size, int]:
    """Return the size and the patch size of a model name such as JiT-B/16."""
    found = re.fullmatch(r"JiT-(\w+)/([1-9]\d{0,3})", name)
    if not found or found[1] not in SIZES:
        raise ValueError(f"model is JiT-SIZE/PATCH with a size of {', '.join(SIZES)}, as in JiT-B/16, not {name!r}")
    return SIZES[found[1]], int(found[2])


def build(
    name: str, *, side: int, classes: int, class_tokens: int = 32, depth: int | None = None, dropout: float = 0.0
) -> "JiT":
    """Return a new model of that name. With another depth, class tokens join at the same fraction."""
    size, patch = parse(name)
    start = size.start if depth is None else round(size.start * depth / size.depth)
    size = size._replace(depth=depth or size.depth, start=start)
    return JiT(size, patch=patch, side=side, classes=classes, class_tokens=class_tokens, dropout=dropout)


class SwiGLU(nn.Module):
    """A gated MLP with two thirds of the usual four widths, so that its three matrices have the parameters of two."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        hidden = 4 * width * 2 // 3
        self.gate_and_value = nn.Linear(width, 2 * hidden)
        self.out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(self.dropout(F.silu(gate) * value))


class JiT(PatchTransformer):
    cosine: Tensor
    sine: Tensor

    def __init__(
        self, size: Size, *, patch: int, side: int, classes: int, class_tokens: int = 32, dropout: float = 0.0
    ):
        width, depth, heads, bottleneck, start = size
        assert width % (4 * heads) == 0 and 0 <= start < depth
        # Dropout, if any, in the middle half: the first and the last blocks carry the pixels.
        rates = [dropout if depth // 4 <= i < depth // 4 * 3 else 0.0 for i in range(depth)]
        super().__init__(
            nn.Sequential(nn.Linear(CHANNELS * patch * patch, bottleneck, bias=False), nn.Linear(bottleneck, width)),
            [Block(width, Attention(width, heads, True, rate), SwiGLU(width, rate), gain=True) for rate in rates],
            width=width,
            patch=patch,
            side=side,
            classes=classes,
            gain=True,
        )
        self.start = start
        angles = rotary_angles(width // heads, side // patch, before=class_tokens)
        self.register_buffer("cosine", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sine", angles.sin().to(torch.get_default_dtype()), persistent=False)
        # Last, so that a model with class tokens draws the same initial weights as the one without.
        self.class_tokens = nn.Parameter(torch.randn(class_tokens, width) * 0.02) if class_tokens else None

    def forward(self, z: Tensor, t: Tensor, label: Tensor) -> Tensor:
        tokens = self.tokens(z)
        patches, before = tokens.shape[1], len(self.cosine) - tokens.shape[1]
        embedded = self.label(label)
        condition = self.condition(t, embedded)
        rotation = self.cosine[before:], self.sine[before:]
        for i, block in enumerate(self.blocks):
            if i == self.start and self.class_tokens is not None:
                joining = embedded[:, None] + self.class_tokens
                tokens = torch.cat([joining.to(tokens.dtype), tokens], dim=1)
                rotation = self.cosine, self.sine
            tokens = block(tokens, condition, rotation)
        return self.image(tokens[:, -patches:], condition)
