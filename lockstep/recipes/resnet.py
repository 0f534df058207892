"""ResNet 18 to 152, with the parameter names of torchvision, so that its ImageNet weights load as they are.

ResNetBackbone(50, dilations=(1, 1, 2, (4, 8, 16)))    # stride 8, for segmentation
ResNetClassifier(18, stem="small", classes=10)         # images of up to 64 pixels: a 3×3 stem without pooling
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Basic(nn.Module):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, dilation, dilation, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 (which has the stride), 1×1 to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Stem and four stages, and with `classes` a linear classifier `fc`; subclasses say what `forward` gives.

    `width` is the channels of the first stage. A stage with dilation keeps the resolution of the one before it. Stems:
    `imagenet`, 7×7 of stride 2 and a pooling; `small`, 3×3 of stride 1; `pooled`, 3×3 of stride 1 and a pooling.
    """

    def __init__(
        self,
        layers: int,
        stem: str = "imagenet",
        width: int = 64,
        dilations: Sequence[int | Sequence[int]] = (1, 1, 1, 1),
        classes: int | None = None,
    ):
        super().__init__()
        if layers not in DEPTHS:
            raise ValueError(f"a ResNet has {', '.join(map(str, DEPTHS))} layers, not {layers}")
        block: type[Basic] | type[Bottleneck] = Basic if layers < 50 else Bottleneck
        large = stem == "imagenet"
        self.stem = stem
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False) if large else nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.channels = width
        for stage, (depth, dilation) in enumerate(zip(DEPTHS[layers], dilations, strict=True)):
            rates = [dilation] * depth if isinstance(dilation, int) else list(dilation)
            assert len(rates) == depth, "one dilation per block"
            stride = 2 if stage and max(rates) == 1 else 1
            blocks = list[nn.Module]()
            for rate in rates:
                blocks.append(block(self.channels, width << stage, stride, rate))
                self.channels, stride = (width << stage) * block.expansion, 1
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        if classes is not None:
            self.fc = nn.Linear(self.channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stages(self, x: Tensor) -> list[Tensor]:
        """Return the features of the four stages, the last one with `channels` channels."""
        x = F.relu(self.bn1(self.conv1(x)))
        if self.stem != "small":
            x = F.max_pool2d(x, 3, 2, 1)
        found = []
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
            found.append(x)
        return found


class ResNetBackbone(ResNet):
    """The features of the four stages."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.stages(x)


class ResNetClassifier(ResNet):
    """Logits (n, K) of the classes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stages(x)[-1].mean((2, 3)))
