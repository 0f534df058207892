"""The just-image transformer: a noisy image in, the clean image out, on raw patches.

    model = build("JiT-B/16", side=256, classes=1000)
    x = model(z, t, label)                       # z, x: (n, 3, S, S); t: (n,) in [0, 1], 1 is clean; label: (n,) int64

The label `model.none` stands for no class. A patch goes through a bottleneck (two linear maps, the first to few
features) before it becomes a token. From block `start` on, class tokens stand before the patches; they are dropped
at the end. Positions are told twice: fixed sines and cosines are added to the tokens, and queries and keys are turned
by angles that follow row and column, so that attention sees how far apart two patches are.

Legend: n samples, L patches, C class tokens, D width, H heads, d = D / H, p patch size, S pixels a side.
"""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dit.model import CHANNELS, frequency_features, modulate, sincos_positions, to_image, to_patches
from ..dit.model import HeadNorm as Norm

_FREQUENCY_FEATURES = 256
_PERIOD = 10_000.0
_EPSILON = 1e-6


class Size(NamedTuple):
    width: int
    depth: int
    heads: int
    bottleneck: int
    """Features that a patch is squeezed to on its way to a token."""
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
    """The size and the patch size that a name such as JiT-B/16 stands for."""
    found = re.fullmatch(r"JiT-(\w+)/([1-9]\d{0,3})", name)
    if not found or found[1] not in SIZES:
        raise ValueError(f"model is JiT-SIZE/PATCH with a size of {', '.join(SIZES)}, as in JiT-B/16, not {name!r}")
    return SIZES[found[1]], int(found[2])


def build(
    name: str, *, side: int, classes: int, class_tokens: int = 32, depth: int | None = None, dropout: float = 0.0
) -> "JiT":
    """The model of that name, freshly initialised; with another depth, class tokens join at the same share of it."""
    size, patch = parse(name)
    start = size.start if depth is None else round(size.start * depth / size.depth)
    size = size._replace(depth=depth or size.depth, start=start)
    return JiT(size, patch=patch, side=side, classes=classes, class_tokens=class_tokens, dropout=dropout)


def rotary_angles(features: int, rows: int, before: int = 0) -> Tensor:
    """(before + rows², features / 2) in float64: half of the angles follow the row, half the column.

    `before` tokens come first that have no place: they are not turned.
    """
    rate = _PERIOD ** (-torch.arange(features // 4, dtype=torch.float64) / (features // 4))
    line = torch.arange(rows, dtype=torch.float64)[:, None] * rate
    row, column = line[:, None].expand(-1, rows, -1), line[None].expand(rows, -1, -1)
    return F.pad(torch.cat([row, column], dim=-1).flatten(0, 1), (0, 0, before, 0))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of the last axis of (..., L, d) by angles whose cosines and sines are (L, d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = Norm(width // heads, eps=_EPSILON)
        self.k_norm = Norm(width // heads, eps=_EPSILON)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (n, H, L, d)
        # The angles are in full precision and widen what they touch; attention wants one type.
        q = rotate(self.q_norm(q), cosine, sine).to(v.dtype)
        k = rotate(self.k_norm(k), cosine, sine).to(v.dtype)
        return self.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """A gated MLP with two thirds of the usual four widths, so that its three matrices weigh what two would."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        hidden = 4 * width * 2 // 3
        self.gate_and_value = nn.Linear(width, 2 * hidden)
        self.out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(self.dropout(F.silu(gate) * value))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = Norm(width, eps=_EPSILON)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = Norm(width, eps=_EPSILON)
        self.mlp = SwiGLU(width, dropout)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1), cosine, sine)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, width: int, features: int):
        super().__init__()
        self.norm = Norm(width, eps=_EPSILON)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, features)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.out(modulate(self.norm(x), shift, scale))


class JiT(nn.Module):
    positions: Tensor
    cosine: Tensor
    sine: Tensor

    def __init__(
        self, size: Size, *, patch: int, side: int, classes: int, class_tokens: int = 32, dropout: float = 0.0
    ):
        super().__init__()
        width, depth, heads, bottleneck, self.start = size
        if side % patch:
            raise ValueError(f"the side of the images is a multiple of the patch size {patch}, not {side}")
        assert width % (4 * heads) == 0 and 0 <= self.start < depth
        self.patch = patch
        self.none = classes
        self.patchify = nn.Sequential(
            nn.Linear(CHANNELS * patch * patch, bottleneck, bias=False), nn.Linear(bottleneck, width)
        )
        self.register_buffer("positions", sincos_positions(width, side // patch), persistent=False)
        angles = rotary_angles(width // heads, side // patch, before=class_tokens)
        self.register_buffer("cosine", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sine", angles.sin().to(torch.get_default_dtype()), persistent=False)
        self.time = nn.Sequential(nn.Linear(_FREQUENCY_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(
            # Dropout, if any, in the middle half: the first and the last blocks carry the pixels.
            Block(width, heads, dropout if depth // 4 <= i < depth // 4 * 3 else 0.0)
            for i in range(depth)
        )
        self.final = FinalLayer(width, CHANNELS * patch * patch)
        self._initialise()
        # Last, so that a model with class tokens draws the same initial weights as the one without.
        self.class_tokens = nn.Parameter(torch.randn(class_tokens, width) * 0.02) if class_tokens else None

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
        zeroed = [self.final.modulation, self.final.out]
        zeroed += [module.modulation for module in self.blocks if isinstance(module, Block)]
        for linear in zeroed:
            nn.init.zeros_(linear.weight)

    def forward(self, z: Tensor, t: Tensor, label: Tensor) -> Tensor:
        tokens = self.patchify(to_patches(z, self.patch)) + self.positions
        patches, extra = tokens.shape[1], len(self.cosine) - tokens.shape[1]
        of_class = self.label(label)
        # Every modulation begins with the same SiLU: it is computed once.
        condition = F.silu(self.time(frequency_features(t)) + of_class)
        cosine, sine = self.cosine[extra:], self.sine[extra:]
        for i, block in enumerate(self.blocks):
            if i == self.start and self.class_tokens is not None:
                joining = of_class[:, None] + self.class_tokens
                tokens = torch.cat([joining.to(tokens.dtype), tokens], dim=1)
                cosine, sine = self.cosine, self.sine
            tokens = block(tokens, condition, cosine, sine)
        return to_image(self.final(tokens[:, -patches:], condition), self.patch, z.shape[-1])
