"""Which modules may follow the first in a unit, and which of them bear sliced features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Dropout, nn.AlphaDropout, nn.Identity,
)  # fmt: skip
"""Work on each element by itself."""

PER_CHANNEL = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.Upsample,
)  # fmt: skip
"""Work on each channel by itself."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_ACTIVATION_SUFFIXES = ("Activation", "GELU", "GELUTanh", "ReLU", "SiLU", "Swish")


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module without parameters works on each element by itself.

    Libraries bring activations of their own, known by their names (``GELUActivation``); that the
    guess is right is checked numerically with every split.
    """
    return isinstance(module, ELEMENTWISE) or is_lookalike(module)


def is_lookalike(module: nn.Module) -> bool:
    """Whether a module is taken for elementwise because of its name."""
    if isinstance(module, ELEMENTWISE):
        return False
    leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    return leaf and type(module).__name__.endswith(_ACTIVATION_SUFFIXES)


def is_per_channel(module: nn.Module) -> bool:
    """Whether a module works on each channel of [sample, channel, ...] by itself."""
    return is_elementwise(module) or isinstance(module, (*PER_CHANNEL, *BATCH_NORMS))


def may_follow(first: nn.Module, module: nn.Module) -> bool:
    """Whether ``module`` joins the unit that ``first`` begins."""
    if isinstance(first, CONVOLUTIONS):
        return is_per_channel(module)
    return is_elementwise(module) or isinstance(module, PER_CHANNEL)


def bears_slices(first: nn.Module, rest: Sequence[nn.Module]) -> bool:
    """Whether all that follows ``first`` works on a slice of its features as on the whole."""
    if isinstance(first, CONVOLUTIONS):
        return all(is_per_channel(m) for m in rest)
    return all(is_elementwise(m) for m in rest)
