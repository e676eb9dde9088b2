"""Networks small enough to train on a laptop in seconds, on 8 × 8 pictures of digits."""

from __future__ import annotations

from torch import nn

from .initialise import he_normal


def mlp() -> nn.Sequential:
    """64-512-512-512-10, three hidden layers: 563,722 parameters, nothing but matrix products."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
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
        nn.Linear(64 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    return network.apply(he_normal)
