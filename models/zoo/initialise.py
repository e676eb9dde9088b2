"""Initial values of networks that have no normalisation."""

from __future__ import annotations

from torch import nn


def he_normal(module: nn.Module) -> None:
    """He et al. (arXiv 1502.01852): weights of deviation √(2 / inputs), no bias; for ``apply``.

    Keeps the size of activations the same from layer to layer under ReLU. With torch's default,
    which is √6 times smaller, a VGG hardly starts to learn and a shallow network takes longer.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
