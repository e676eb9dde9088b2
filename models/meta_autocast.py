"""Autocast on torch's meta device, which has none: what is computed there gets the types that it
has on a GPU, so that bytes and operations can be told without one."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # torch has no public name for it

# What torch.autocast casts on CUDA, by the functions' names (PyTorch's documentation of torch.amp,
# "CUDA Ops that can autocast to float16" and "to float32"). What is made of them in C++ and would
# be cast inside is named too: recurrent layers, attention, einsum.
_LOWER = frozenset(
    [
        "__matmul__",
        "__rmatmul__",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "einsum",
        "gru",
        "gru_cell",
        "linear",
        "lstm",
        "lstm_cell",
        "matmul",
        "mm",
        "multi_dot",
        "multi_head_attention_forward",
        "mv",
        "prelu",
        "rnn_relu",
        "rnn_tanh",
        "scaled_dot_product_attention",
    ]
)
_FULL = frozenset(
    [
        "__pow__",
        "__rpow__",
        "__rdiv__",
        "__rtruediv__",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cdist",
        "cosh",
        "cosine_embedding_loss",
        "cosine_similarity",
        "cross_entropy",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_softmax",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "renorm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "tan",
        "triplet_margin_loss",
    ]
)


class MetaAutocast(TorchFunctionMode):
    """``torch.autocast`` to ``dtype`` for tensors on the meta device; others are left alone.

    As on a GPU float64 stays, other functions take the wider of their types where they are given
    several, and a parameter that several functions take is cast once."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        to = self._dtype if name in _LOWER else torch.float32 if name in _FULL else None
        if to is None:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._as(t, to), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        half_or_full = (torch.float16, torch.bfloat16, torch.float32)
        if not tensor.is_meta or tensor.dtype == dtype or tensor.dtype not in half_or_full:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        # Held with what it was made of: a number may be another tensor's once one is freed.
        if id(tensor) not in self._cast:
            self._cast[id(tensor)] = tensor, tensor.to(dtype)
        return self._cast[id(tensor)][1]
