"""ResNet-50 (He et al., arXiv 1512.03385) and Wide ResNet-101-2 (Zagoruyko & Komodakis, arXiv
1605.07146), both with the stride in the 3 × 3 convolution, as torchvision and NVIDIA have it.

Parameter names follow torchvision's, so published weights load. Every use of an activation has
its own module, so that each module is called once per forward and can be one unit.
"""

from __future__ import annotations

from torch import Tensor, nn

EXPANSION = 4
"""A block's output is four times as wide as its stage's base width."""


class Bottleneck(nn.Module):
    """1 × 1 down to ``width``, 3 × 3, 1 × 1 up to ``out_channels``, plus the shortcut."""

    def __init__(self, in_channels: int, width: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride)
        self.relu3 = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu1(self.bn1(self.conv1(inputs)))
        hidden = self.relu2(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        outputs: Tensor = self.relu3(hidden + self.downsample(inputs))
        return outputs


class ResNet(nn.Module):
    """Images [sample, 3, y, x] to logits [sample, class].

    ``blocks`` per stage; ``widening`` multiplies the width inside blocks. ``thumbnail`` replaces
    the stem (7 × 7 with stride 2, then pooling: a quarter of the resolution) by a 3 × 3
    convolution that keeps it, as is usual for 32-pixel images.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        widening: int = 1,
        classes: int = 1000,
        *,
        thumbnail: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if thumbnail else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if thumbnail else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks[0], widening, stride=1)
        self.layer2 = _stage(256, 128, blocks[1], widening, stride=2)
        self.layer3 = _stage(512, 256, blocks[2], widening, stride=2)
        self.layer4 = _stage(1024, 512, blocks[3], widening, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(2048, classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits: Tensor = self.fc(self.flatten(self.avgpool(hidden)))
        return logits


def resnet50() -> ResNet:
    """As published, 224 pixels and 1000 classes: 25,557,032 parameters."""
    return ResNet((3, 4, 6, 3))


def resnet50_thumbnail() -> ResNet:
    """For 32-pixel images, 10 classes: 23,520,842 parameters."""
    return ResNet((3, 4, 6, 3), classes=10, thumbnail=True)


def wide_resnet101() -> ResNet:
    """WRN-101-2, 224 pixels and 1000 classes: 126,886,696 parameters."""
    return ResNet((3, 4, 23, 3), widening=2)


def _stage(in_channels: int, width: int, count: int, widening: int, stride: int) -> nn.Sequential:
    """``count`` blocks, of which the first changes resolution and number of channels."""
    out_channels = EXPANSION * width
    first = Bottleneck(in_channels, width * widening, out_channels, stride)
    others = (Bottleneck(out_channels, width * widening, out_channels, 1) for _ in range(count - 1))
    return nn.Sequential(first, *others)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
