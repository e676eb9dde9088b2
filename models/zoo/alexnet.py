"""AlexNet, in the single-column form of Krizhevsky, "One weird trick for parallelizing
convolutional neural networks" (arXiv 1404.5997, 2014): the paper that proposed data parallel
convolutions with model parallel fully connected layers.

Parameter names follow torchvision's, so published weights load.
"""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Images [sample, 3, 224, 224] to logits [sample, class]; 61,100,840 parameters at 1000."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
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
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        features = self.flatten(self.avgpool(self.features(images)))
        logits: Tensor = self.classifier(features)
        return logits


def alexnet() -> AlexNet:
    """The published network: 224 pixels, 1000 classes."""
    return AlexNet()
