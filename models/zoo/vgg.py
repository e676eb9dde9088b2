"""VGG (Simonyan & Zisserman, arXiv 1409.1556, table 1, configurations A, D and E).

Nearly all parameters are in the fully connected layers and nearly all arithmetic in the
convolutions, which is why group hybrid parallelism, P3 and DeepPool all measure it. Parameter
names follow torchvision's, so published weights load.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from .initialise import he_normal

Depth = Literal[11, 16, 19]

_CONVOLUTIONS_PER_STAGE: dict[Depth, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
_STAGE_CHANNELS = (64, 128, 256, 512, 512)
_CLASSIFIER_WIDTH = 4096


class VGG(nn.Module):
    """Images [sample, 3, y, x] to logits [sample, class].

    ``grid`` is the side of the feature map that enters the classifier, ``narrowing`` divides all
    widths. Dropout as published.
    """

    def __init__(self, depth: Depth, grid: int, classes: int, narrowing: int = 1) -> None:
        super().__init__()
        width = _CLASSIFIER_WIDTH // narrowing
        self.features = nn.Sequential(*_feature_layers(depth, narrowing))
        self.avgpool = nn.AdaptiveAvgPool2d(grid)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(_STAGE_CHANNELS[-1] // narrowing * grid * grid, width),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(width, classes),
        )
        self.apply(he_normal)

    def forward(self, images: Tensor) -> Tensor:
        features = self.flatten(self.avgpool(self.features(images)))
        logits: Tensor = self.classifier(features)
        return logits


def vgg(depth: Depth) -> VGG:
    """As published: 224 pixels, a 7 × 7 feature map, 1000 classes. VGG-16: 138,357,544."""
    return VGG(depth, grid=7, classes=1000)


def vgg_thumbnail(depth: Depth) -> VGG:
    """For 32-pixel images: the convolutions as published, leaving 512 features in a 1 × 1 map.

    The classifier keeps the published widths, 512-4096-4096-10. The first layer is 49 times
    smaller than at 224 pixels, but the 18.9 million parameters of the classifier still outweigh
    VGG-16's 14.7 million of convolutions, so the network keeps its character.
    """
    return VGG(depth, grid=1, classes=10)


def narrow_vgg_thumbnail(depth: Depth) -> VGG:
    """For 32-pixel images, every width a quarter of the published: 2,112,730 parameters at depth
    16. The feature maps of a sample are a quarter, parameters and arithmetic a sixteenth, so that
    feature maps outweigh parameters at batches that a CPU computes in less than a second.
    """
    return VGG(depth, grid=1, classes=10, narrowing=4)


def _feature_layers(depth: Depth, narrowing: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for count, published in zip(_CONVOLUTIONS_PER_STAGE[depth], _STAGE_CHANNELS, strict=True):
        width = published // narrowing
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers
