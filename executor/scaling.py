"""The weight of each rank's samples, applied where gradients enter: at the model's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

from .forward import Forward


class _Scale(torch.autograd.Function):
    """The identity; its backward multiplies by the forward's factor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Forward, began: Callable[[Forward], None]
    ) -> Any:
        ctx.record, ctx.began = forward, began
        # An alias that autograd does not know as a view: the user may change it in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        ctx.began(ctx.record)
        factor = ctx.record.factor()
        if factor == 1.0:
            return gradient, None, None
        # Zeros, not a product: the mean over no samples is not a number.
        scaled = gradient * factor if factor else torch.zeros_like(gradient)
        return scaled, None, None


def scale_output(output: Any, forward: Forward, began: Callable[[Forward], None]) -> Any:
    """``output`` with the gradient of each of its tensors weighted by the forward's factor.

    Tensors are found in whatever torch flattens, and in dataclasses. ``began(forward)`` is called
    in backward before the first gradient of this output goes on.
    """

    def scale(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
            return _Scale.apply(leaf, forward, began)  # type: ignore[no-untyped-call]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _scale_fields(leaf, lambda value: scale_output(value, forward, began))
        return leaf

    return pytree.tree_map(scale, output)


def _scale_fields(record: Any, scale: Callable[[Any], Any]) -> Any:
    changed = {f.name: scale(getattr(record, f.name)) for f in dataclasses.fields(record) if f.init}
    same = all(changed[name] is getattr(record, name) for name in changed)
    return record if same else dataclasses.replace(record, **changed)
