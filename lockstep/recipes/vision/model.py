"""The networks: ResNet 18, 34 and 50, ViT-S, UNet; normalised pixels in, logits out.

    build("resnet18", classes=10, side=32)       # (n, 3, S, S) -> (n, K)
    build("unet", classes=11, side=32, width=8)  # (n, 3, S, S) -> (n, K, S, S)

Parameters have the names of torchvision (ResNet) and timm (ViT), so that their ImageNet weights load as they are.

Legend: n samples, S pixels per side, K classes, L tokens, D width of a token, H heads.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...weights import copy_weights, read_weights
from ..resnet import ResNetClassifier

RESNETS = {"resnet18": 18, "resnet34": 34, "resnet50": 50}
HEADS = ("fc", "head", "last")
"""The last layers, with one output per class: new where pretrained weights are of other classes."""
SMALL = 64
"""Largest side for which the stem keeps the resolution."""
_REMEDY = "Give the --model, --stem, --width and --img_size that it was trained with."
_VIT_DEPTH, _VIT_HEADS = 12, 6
_UNET_LEVELS = 5


def build(
    name: str, *, classes: int, side: int, width: int = 64, stem: str = "auto", patch: int | None = None
) -> nn.Module:
    """Return a new model of that name."""
    if name == "unet":
        if side < 1 << _UNET_LEVELS - 1:
            raise ValueError(f"a unet halves its images four times: img_size is at least 16, not {side}")
        return UNet(classes, width)
    if name == "vit_s":
        return ViT(classes, side, patch or patch_for(side), _VIT_HEADS * width)
    return ResNetClassifier(RESNETS[name], stem_for(side) if stem == "auto" else stem, width, classes=classes)


def stem_for(side: int) -> str:
    return "small" if side <= SMALL else "imagenet"


def patch_for(side: int) -> int:
    """Return the default patch size: 16; less for small images, so that there are at least 7 × 7 patches."""
    return 16 if side > SMALL else next((p for p in (8, 4, 2) if side % p == 0 and side // p >= 7), 1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (n, L, D)


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(self, classes: int, side: int, patch: int, width: int, depth: int = _VIT_DEPTH):
        super().__init__()
        if side % patch:
            raise ValueError(
                f"img_size is a multiple of the patch size {patch}, not {side}; {side // patch * patch} is"
            )
        self.patch_embed = PatchEmbed(patch, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, _VIT_HEADS) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3×3 convolutions, each with norm and ReLU."""
    layers = list[nn.Module]()
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Five levels, `width` channels at the first (64 as published) and sixteen times that at the last; bilinear up."""

    def __init__(self, classes: int, width: int = 64):
        super().__init__()
        widths = [width << level for level in range(_UNET_LEVELS)]
        self.down = nn.ModuleList(_double(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_double(widths[k] + widths[k + 1], widths[k]) for k in reversed(range(len(widths) - 1)))
        self.last = nn.Conv2d(width, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module is not self.last:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            # To the size of the skip connection: with an odd side that is not twice its own.
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([skip, x], dim=1))
        return self.last(x)


def load_pretrained(model: nn.Module, path: str) -> str:
    """Load weights of torchvision, timm or another run; a line that says what was loaded.

    A head with another number of classes keeps its initial weights.
    """
    weights, own = read_weights(Path(path).expanduser()), model.state_dict()
    head = next(name for name in HEADS if f"{name}.bias" in own)
    classes = len(own[f"{head}.bias"])
    found = len(weights.get(f"{head}.bias", ()))
    skip = () if found == classes else (f"{head}.",)
    count = copy_weights(model, weights, path, _REMEDY, skip)
    note = f"; the head {head} is new ({found or 'no'} classes in the file, {classes} here)" if skip else ""
    return f"pretrained: {count} tensors from {path}{note}"


def count_flops(model: nn.Module, side: int) -> dict[str, int]:
    """Return the FLOPs of one image's forward pass by module, and under "" in total; nothing is computed.

    A multiply-add counts as two. `model` is on the meta device.
    """
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, side, side, device="meta"))
    own = {name.partition(".")[2]: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return own | {"": counter.get_total_flops()}


def summary(model: nn.Module, side: int) -> str:
    """Return a table of the model's parts with their parameters and FLOPs. `model` is on the meta device."""
    flops = count_flops(model, side)
    parts = [(name, child) for name, child in model.named_children()]
    rows = [(name, sum(p.numel() for p in child.parameters()), flops.get(name, 0)) for name, child in parts]
    rows.append(("total", sum(p.numel() for p in model.parameters()), flops[""]))
    lines = [f"{name:14}{count:>14,}{operations / 1e6:>14,.1f}" for name, count, operations in rows]
    return "\n".join([f"{'part':14}{'parameters':>14}{'MFLOPs/image':>14}", *lines])
