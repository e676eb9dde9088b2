"""Convolutions and what follows them on a member whose slice of the channels is empty.

torch's convolution refuses empty outputs and, given empty inputs, returns a wrong shape without an
error; pooling and normalisation refuse no channels too. Here one channel of zeros stands in and is
dropped again, and empty tensors are added as sums, so that the graph reaches what it would reach.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .following import BATCH_NORMS, CONVOLUTIONS, PER_CHANNEL

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def make_hollow(module: nn.Module) -> None:
    """Lets a module of a column unit (convolution, normalisation, pooling) work on no channels."""
    original = module.forward

    def forward(x: Tensor) -> Tensor:
        if isinstance(module, CONVOLUTIONS):
            return _attach(_one_channel_out(module, x)[:, :0], module)
        if isinstance(module, BATCH_NORMS):
            return _attach(_counted(module, x), module)
        empty: Tensor = original(_stand_in(x))[:, :0]
        return empty + x.sum()

    if isinstance(module, (*CONVOLUTIONS, *BATCH_NORMS, *PER_CHANNEL)):
        module.forward = forward  # type: ignore[method-assign, assignment]


def hollow_partial(module: Convolution, x: Tensor) -> Tensor:
    """The partial sums of a convolution without input channels: zeros of the full shape."""
    weight = module.weight
    kernel = weight.new_zeros(weight.shape[0], 1, *weight.shape[2:])
    zeros: Tensor = module._conv_forward(_stand_in(x), kernel, None)
    return zeros + x.sum() + weight.sum()


def _one_channel_out(module: Convolution, x: Tensor) -> Tensor:
    kernel = module.weight.new_zeros(1, *module.weight.shape[1:])
    channel: Tensor = module._conv_forward(x, kernel, None)
    return channel


def _stand_in(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=x.dtype, device=x.device)


def _attach(x: Tensor, module: nn.Module) -> Tensor:
    """Adds the module's empty parameters, whose sums are zero."""
    for parameter in module.parameters(recurse=False):
        x = x + parameter.sum()
    return x


def _counted(module: nn.Module, x: Tensor) -> Tensor:
    """The batch is counted as on the members that have channels."""
    count = getattr(module, "num_batches_tracked", None)
    if module.training and isinstance(count, Tensor):
        count.add_(1)
    return x
