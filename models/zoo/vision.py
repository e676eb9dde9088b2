"""Networks for images. Parameter names follow torchvision's, so published weights load.

VGG: Simonyan & Zisserman, arXiv 1409.1556, table 1, configurations A, D and E. Nearly all its
parameters are in the fully connected layers and nearly all arithmetic in the convolutions, which is
why group hybrid parallelism, P3 and DeepPool all measure it. ResNet-50: He et al., arXiv
1512.03385, and Wide ResNet-101-2: Zagoruyko & Komodakis, arXiv 1605.07146, both with the stride in
the 3 × 3 convolution, as torchvision and NVIDIA have it; every use of an activation has its own
module, so that each module is called once per forward and can be one unit.
"""

from itertools import pairwise
from typing import Literal

from torch import Tensor, nn


def he_normal(module: nn.Module) -> None:
    """He et al. (arXiv 1502.01852): weights of deviation √(2 / inputs), no bias; for ``apply``.

    Keeps the size of activations the same from layer to layer under ReLU. With torch's default,
    which is √6 times smaller, a VGG hardly starts to learn and a shallow network takes longer.
    """
    # What has no values needs none: drawing them takes a second there, for what torch imports.
    if isinstance(module, nn.Conv2d | nn.Linear) and not module.weight.is_meta:
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _hidden(*widths: int) -> list[nn.Module]:
    """Fully connected layers from each width to the next, all followed by a ReLU."""
    ends = pairwise(widths)
    return [layer for i, o in ends for layer in (nn.Linear(i, o), nn.ReLU())]


def mlp() -> nn.Sequential:
    """64-512-512-512-10, three hidden layers: 563,722 parameters, nothing but matrix products."""
    network = nn.Sequential(nn.Flatten(), *_hidden(64, 512, 512, 512), nn.Linear(512, 10))
    return network.apply(he_normal)


def cnn_digits() -> nn.Sequential:
    """Three convolutions, then 1024-1024-512-10 fully connected: 1,635,274 parameters.

    A VGG in miniature: the fully connected layers have 97% of the parameters, the convolutions
    over half of the multiplications, so there is something to decide even at this size.
    """
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        *_hidden(64 * 4 * 4, 1024, 512),
        nn.Linear(512, 10),
    )
    return network.apply(he_normal)


class ConvNet(nn.Module):
    """Images [sample, 3, y, x] to logits [sample, class]. ``grid`` is the side of the feature map
    that enters the classifier."""

    def __init__(self, features: nn.Sequential, grid: int, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(grid)
        self.flatten = nn.Flatten()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        features = self.flatten(self.avgpool(self.features(images)))
        logits: Tensor = self.classifier(features)
        return logits


def alexnet() -> ConvNet:
    """For 224 pixels and 1000 classes: 61,100,840 parameters.

    In the single-column form of Krizhevsky, "One weird trick for parallelizing convolutional neural
    networks" (arXiv 1404.5997, 2014), the paper that proposed data parallel convolutions with model
    parallel fully connected layers.
    """
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
    )
    return ConvNet(features, 6, _classifier(256 * 6 * 6, 4096, 1000, dropout_first=True))


def _classifier(inputs: int, width: int, classes: int, dropout_first: bool) -> nn.Sequential:
    """Three linear layers, with a dropout before or after the first two."""
    layers: list[nn.Module] = []
    for size in (inputs, width):
        layer = [nn.Linear(size, width), nn.ReLU()]
        layers += [nn.Dropout(), *layer] if dropout_first else [*layer, nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


Depth = Literal[11, 16, 19]

_CONVOLUTIONS_PER_STAGE: dict[Depth, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
_STAGE_CHANNELS = (64, 128, 256, 512, 512)
_CLASSIFIER_WIDTH = 4096


def _vgg(depth: Depth, grid: int, classes: int, width_divisor: int = 1) -> ConvNet:
    """``width_divisor`` divides all widths. Dropout as published."""
    layers: list[nn.Module] = []
    channels = 3
    for count, published in zip(_CONVOLUTIONS_PER_STAGE[depth], _STAGE_CHANNELS, strict=True):
        width = published // width_divisor
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    inputs, width = (
        _STAGE_CHANNELS[-1] // width_divisor * grid * grid,
        _CLASSIFIER_WIDTH // width_divisor,
    )
    classifier = _classifier(inputs, width, classes, dropout_first=False)
    network = ConvNet(features, grid, classifier)
    network.apply(he_normal)
    return network


def vgg(depth: Depth) -> ConvNet:
    """As published: 224 pixels, a 7 × 7 feature map, 1000 classes. VGG-16: 138,357,544."""
    return _vgg(depth, grid=7, classes=1000)


def vgg_thumbnail(depth: Depth) -> ConvNet:
    """For 32-pixel images: the convolutions as published, leaving 512 features in a 1 × 1 map.

    The classifier keeps the published widths, 512-4096-4096-10. The first layer is 49 times
    smaller than at 224 pixels, but the 18.9 million parameters of the classifier still outweigh
    VGG-16's 14.7 million of convolutions, so the network keeps its character.
    """
    return _vgg(depth, grid=1, classes=10)


def narrow_vgg_thumbnail(depth: Depth) -> ConvNet:
    """For 32-pixel images, every width a quarter of the published: 2,112,730 parameters at depth
    16. The feature maps of a sample are a quarter, parameters and arithmetic a sixteenth, so that
    feature maps outweigh parameters at batches that a CPU computes in less than a second.
    """
    return _vgg(depth, grid=1, classes=10, width_divisor=4)


# A block's output is four times as wide as its stage's base width.
EXPANSION = 4


class Bottleneck(nn.Module):
    """1 × 1 down to ``width``, 3 × 3, 1 × 1 up to ``out_channels``, plus the shortcut."""

    def __init__(self, in_channels: int, width: int, out_channels: int, stride: int) -> None:
        super().__init__()
        # Without biases: each convolution is followed by a normalisation, which has one.
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))
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


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
