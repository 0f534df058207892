"""ResNet and ASPP for segmentation, with the localization rectification module (LoRM) in training.

    build("res50_ASPP_lorm", layers=50, classes=21)     # 33.15 M parameters, 8.39 M of them LoRM's
    build("deeplabv2", layers=101, classes=21)
    load_backbone(model, "resnet50.pth")                # torchvision's ImageNet weights

Legend: N images, C channels of the last features, K classes, H × W pixels, h × w positions at stride 8, P = h·w.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...weights import copy_weights, read_weights
from ..confusion import IGNORE
from ..resnet import DEPTHS, ResNetBackbone

MODEL_TYPES = ("res50_ASPP_lorm", "deeplabv2", "deeplabv3p")


def nearest(label: Tensor, size: tuple[int, int]) -> Tensor:
    """Downsample labels (N, H, W) to (N, h, w) by the pixel in the middle of each cell."""
    height, width = label.shape[-2:]
    rows = (2 * torch.arange(size[0], device=label.device) + 1) * height // (2 * size[0])
    columns = (2 * torch.arange(size[1], device=label.device) + 1) * width // (2 * size[1])
    return label[..., rows[:, None], columns]


def feature_size(height: int, width: int) -> tuple[int, int]:
    """Return height and width of the features of an image, at stride 8."""
    return -(-height // 8), -(-width // 8)


class LoRM(nn.Module):
    """Rectify the features of each foreground position by a mixture of all similar ones; in training only."""

    def __init__(self, channels: int):
        super().__init__()
        self.query = nn.Conv2d(channels, channels, 1, bias=False)
        self.key = nn.Conv2d(channels, channels, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor, pseudo: Tensor) -> Tensor:
        """Return the squared distance of features (N, C, h, w) to the rectified ones, a mean over channels, summed over
        the positions whose pseudo label (N, H, W) is foreground. Ignored positions are neither rectified nor mixed in.
        """
        label = nearest(pseudo, (features.shape[-2], features.shape[-1])).flatten(1)  # (N, P)
        query = F.normalize(self.query(features).flatten(2), dim=1)  # (N, C, P)
        key = F.normalize(self.key(features).flatten(2), dim=1)
        cosine = (query.transpose(1, 2) @ key).to(torch.get_default_dtype())  # (N, P, P)
        # Not −inf: for an image without any label the softmax would be nan.
        cosine = cosine.masked_fill((label == IGNORE)[:, None], torch.finfo(cosine.dtype).min)
        x = features.flatten(2).to(cosine.dtype)
        rectified = self.scale * (x @ cosine.softmax(-1).transpose(1, 2))  # (N, C, P)
        distance = (x - rectified).square().mean(1)  # (N, P)
        return (distance * foreground(label)).sum()


def foreground(label: Tensor) -> Tensor:
    return (label != 0) & (label != IGNORE)


class ASPP(nn.Module):
    """1×1, 3×3 at several dilations and the mean of the image, each with norm and ReLU; then 1×1 over all."""

    def __init__(self, channels: int, width: int, outputs: int, rates: Sequence[int]):
        super().__init__()
        self.branches = nn.ModuleList([_unit(channels, width, 1)])
        self.branches.extend(_unit(channels, width, 3, rate) for rate in rates)
        self.pooled = _unit(channels, width, 1)
        self.project = nn.Sequential(
            nn.Conv2d((len(rates) + 2) * width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1 and isinstance(self.pooled[1], nn.BatchNorm2d):
            raise ValueError("BatchNorm of an image's mean needs at least 2 images at once, not 1; raise --batch_size")
        whole = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        out: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), whole], dim=1))
        return out


def _unit(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


# Heads: from the features of the backbone's four stages to class scores on a coarser grid.


class AsppHead(nn.Module):
    """ASPP straight to classes."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.aspp = ASPP(channels, classes, classes, (12, 18, 24))

    def forward(self, stages: list[Tensor]) -> Tensor:
        out: Tensor = self.aspp(stages[-1])
        return out


class SumHead(nn.Module):
    """DeepLabv2: 3×3 convolutions to classes at four dilations, added up."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Conv2d(channels, classes, 3, padding=rate, dilation=rate) for rate in (6, 12, 18, 24)
        )
        for branch in self.branches:
            assert isinstance(branch, nn.Conv2d) and branch.bias is not None
            nn.init.normal_(branch.weight, std=0.01)
            nn.init.zeros_(branch.bias)

    def forward(self, stages: list[Tensor]) -> Tensor:
        return torch.stack([branch(stages[-1]) for branch in self.branches]).sum(0)


class DecoderHead(nn.Module):
    """DeepLabv3+: ASPP, then two 3×3 convolutions at stride 4 together with the first stage's features."""

    def __init__(self, channels: int, low: int, classes: int):
        super().__init__()
        self.aspp = ASPP(channels, 256, 256, (12, 24, 36))
        self.low = _unit(low, 48, 1)
        self.decode = nn.Sequential(_unit(256 + 48, 256, 3), _unit(256, 256, 3), nn.Conv2d(256, classes, 1))

    def forward(self, stages: list[Tensor]) -> Tensor:
        low = self.low(stages[0])
        high = F.interpolate(self.aspp(stages[-1]).relu(), low.shape[2:], mode="bilinear")
        out: Tensor = self.decode(torch.cat([high, low], dim=1))
        return out


class Segmenter(nn.Module):
    """Images (N, 3, H, W), normalised, to class scores (N, K, H, W)."""

    def __init__(self, backbone: ResNetBackbone, head: nn.Module, lorm: LoRM | None):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.lorm = lorm

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.backbone(x), x)

    def scores(self, stages: list[Tensor], x: Tensor) -> Tensor:
        """Return the class scores of every pixel of x from its features."""
        return F.interpolate(self.head(stages), x.shape[2:], mode="bilinear")


def build(model_type: str, layers: int, classes: int) -> Segmenter:
    """Return a new model of one of MODEL_TYPES, on a ResNet of stride 8."""
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type is one of {', '.join(MODEL_TYPES)}, not {model_type!r}")
    if layers not in DEPTHS:
        raise ValueError(f"layers is one of {', '.join(map(str, DEPTHS))}, not {layers}")
    rectifies = model_type == "res50_ASPP_lorm"
    last: int | Sequence[int] = (4, 8, 16)[: DEPTHS[layers][-1]] if rectifies else 4
    backbone = ResNetBackbone(layers, dilations=(1, 1, 2, last))
    channels, low = backbone.channels, backbone.channels // 8
    if rectifies:
        return Segmenter(backbone, AsppHead(channels, classes), LoRM(channels))
    return Segmenter(
        backbone, SumHead(channels, classes) if model_type == "deeplabv2" else DecoderHead(channels, low, classes), None
    )


def load_backbone(model: Segmenter, path: str) -> None:
    """Load ImageNet weights under torchvision's names, without its classifier `fc`."""
    weights = read_weights(Path(path).expanduser())
    copy_weights(model.backbone, weights, path, "Give the file that fits --layers.", skip=("fc.",))
