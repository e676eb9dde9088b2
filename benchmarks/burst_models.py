"""The models of ``benchmarks/burst_measured.py``, the same in the foreground and background."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from meshwright.models.workload import Workload
from meshwright.models.zoo import build
from meshwright.models.zoo.images import Pictures, image_workload
from meshwright.models.zoo.vgg import vgg_thumbnail
from torch import nn

CONVOLUTIONS = "vgg16-32-conv"
"""VGG-16's convolutions for 32-pixel images and a single linear layer after them."""


def fresh(name: str) -> Workload:
    """The model as every system starts with it."""
    torch.manual_seed(0)
    if name != CONVOLUTIONS:
        return build(name)
    model = vgg_thumbnail(16)
    model.classifier = nn.Sequential(nn.Linear(512, 10))
    return image_workload(name, model, Pictures(channels=3, pixels=32, classes=10))


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What all train with."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
