"""What can be asked of a tensor without its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_leaf", "is_sparse", "is_cuda",
    "is_meta", "requires_grad",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "element_size", "__len__", "is_floating_point",
    "is_complex", "is_contiguous",
)  # fmt: skip

METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
    ]
)
"""Torch functions that look at shape, type and place only."""
