"""Running a model without its memory: on torch's meta device tensors have shapes and no values.

Everything that is asked of an estimate can be had there (units, edges, operations, storages), so
that a model need not fit into this machine. What a model does by its values cannot (``.item()``, an
index of what is not zero): it is refused by torch, and the caller falls back on real tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..models.spec import UnitSpec
from ..models.workload import Batch, Workload
from ..planner.schema.curve import Curve
from .footprint import Footprint, measure_footprint

META = torch.device("meta")

_ATTENTION: Any = F.scaled_dot_product_attention
_FUSED: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def is_dry(model: nn.Module) -> bool:
    """Whether the model has no memory."""
    return all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def dry(workload: Workload) -> Workload:
    """The same workload on the meta device; its model is copied but for its tensors, unless it is
    there already."""
    model = workload.model

    def make_batch(size: int) -> Batch:
        with META:
            return workload.make_batch(size).to(META)

    if is_dry(model):
        return replace(workload, make_batch=make_batch)
    memo: dict[int, Any] = {id(b): b.to(META) for b in model.buffers()}
    for parameter in model.parameters():
        twin = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
        memo[id(parameter)] = twin
    return replace(workload, model=copy.deepcopy(model, memo), make_batch=make_batch)


class FusedAttention(TorchFunctionMode):
    """Attention as fused kernels have it. On the meta device torch takes the way that makes the
    whole matrix of scores, which no device of today's does in training."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is _ATTENTION and args and args[0].is_meta and not given.get("enable_gqa"):
            return _fused(*args, **given)
        return func(*args, **given)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    found = _FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    result: Tensor = found[0]
    return result


class Footprints:
    """Footprints at some batch sizes, as curves."""

    def __init__(self, workload: Workload, units: Sequence[UnitSpec], sizes: Sequence[int]) -> None:
        device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
        self.sizes = tuple(sorted(sizes))
        with FusedAttention():
            self._found = [
                measure_footprint(
                    workload.model, units, workload.make_batch(n), workload.loss, device
                )
                for n in self.sizes
            ]

    def curve(self, quantity: str, unit: str, factor: float = 1.0) -> Curve:
        """A field of ``Footprint`` for a unit; linear between and beyond the sizes."""
        values = [getattr(one, quantity).get(unit, 0) * factor for one in self._found]
        return Curve(x=tuple(map(float, self.sizes)), y=tuple(values))

    @property
    def smallest(self) -> Footprint:
        """The footprint at the smallest size."""
        return self._found[0]
