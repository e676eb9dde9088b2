"""Running a model without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Puts buffers (running statistics), gradients, train/eval flags and random states back at the
    end. Parameters are not copied: a forward and backward do not change them.
    """
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
