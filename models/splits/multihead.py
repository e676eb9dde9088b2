"""``nn.MultiheadAttention`` by heads, with a forward of our own.

Its own forward hands all weights to one function that takes them whole. Nothing is returned for the
attention weights: they would be of the member's heads only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...planner.cost.ownership import feature_bounds
from ..spec import SplitSpec
from .linear import patch_row
from .recipe import Place, cuts_of, qualified


class MultiheadRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """A pair, for packed projections with the batch first and nothing added to the keys."""
        module = model.get_submodule(modules[0])
        if type(module) is not nn.MultiheadAttention or len(modules) > 1:
            return []
        plain = module.bias_k is None and not module.add_zero_attn
        if not (plain and module.batch_first and module._qkv_same_embed_dim):
            return []
        packed = {"in_proj_weight": 0, "in_proj_bias": 0}
        cuts = [
            *cuts_of(model, modules[0], packed, blocks=3),
            *cuts_of(model, qualified(modules[0], "out_proj"), {"weight": 1}),
        ]
        return [SplitSpec("pair", module.num_heads, False, module.embed_dim, -1, tuple(cuts))]

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        assert isinstance(module, nn.MultiheadAttention)
        patch_row(module.out_proj, place.reduce)
        heads = slice(*feature_bounds(module.num_heads, place.degree, place.member))
        module.forward = _forward(module, heads)  # type: ignore[method-assign]
        # torch's encoder layer reads the weights itself where it thinks that they are whole.
        module._qkv_same_embed_dim = False


def _forward(module: nn.MultiheadAttention, heads: slice) -> Callable[..., tuple[Tensor, None]]:
    """Attention [sample, position, width] of some of the heads; arguments as torch's."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        q, k, v = (
            _by_head(F.linear(x, w, b), module.head_dim)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mask = _mask(attn_mask, key_padding_mask, len(query), heads, query.dtype)
        dropout = module.dropout if module.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return module.out_proj(mixed.transpose(1, 2).flatten(2)), None

    return forward


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    """[sample, position, head × size] as [sample, head, position, size]."""
    heads = x.shape[-1] // head_dim  # torch could not tell of a group that has no samples
    return x.view(*x.shape[:-1], heads, head_dim).transpose(1, 2)


def _mask(
    scores: Tensor | None, padding: Tensor | None, samples: int, heads: slice, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores [sample, head, to, from]. ``scores`` is [to, from] or, with all
    heads of all samples in dim 0, [·, to, from]; ``padding`` is [sample, from].
    """
    parts = []
    if scores is not None:
        per_head = scores.dim() == 3
        every = len(scores) // samples if samples else heads.stop
        whole = scores.view(samples, every, *scores.shape[1:]) if per_head else scores
        parts.append(whole[:, heads] if per_head else whole)
    if padding is not None:
        parts.append(padding[:, None, None, :])
    added = [_additive(part, dtype) for part in parts]
    return sum(added[1:], added[0]) if added else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True means "do not look"."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
