"""A model whose own code does something between two units, and a function of its own for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Softmax(torch.autograd.Function):
    """The softmax over features, with a backward of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Between(nn.Module):
    """Two units and what the model's own code does between them."""

    def __init__(self, glue: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.glue(self.first(x)))
