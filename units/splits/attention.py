"""Attention by heads: queries, keys and values by columns, the output projection by rows.

Recognised by the names of their projections, which most code shares: packed (``c_attn``), or
``q_proj``, ``k_proj``, ``v_proj`` (``query``, ``key``, ``value``), with the output projection
inside the module (``pair``) or, as in BERT, in another (``column``: the mixed heads are left as
features for it). The module's own forward runs on fewer heads. That a module of these names works
so is checked numerically before a split is offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from torch import nn

from ..spec import ParameterCut, Reduce, SplitSpec
from .linear import features_of, is_linear, out_dim, patch_row, sync_width
from .recipe import cuts_of, qualified

_PACKED = (("c_attn", "c_proj"), ("qkv", "proj"), ("in_proj", "out_proj"))
_SEPARATE = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ()),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("wq", "wk", "wv"), ("wo",)),
)
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "heads", "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "attention_head_size")
_WIDTHS = ("split_size", "all_head_size")
"""Attributes that hold the number of heads times their size."""


@dataclass(frozen=True)
class Projections:
    """The projections of an attention module: ``ins`` by columns (one with three blocks if
    packed), ``out`` by rows if it lies in the module."""

    ins: tuple[str, ...]
    blocks: int
    out: str | None
    heads: int


def projections_of(module: nn.Module) -> Projections | None:
    """The projections of a module that looks like attention, else None."""
    children = {name for name, child in module.named_children() if is_linear(child)}
    head_size = _head_size(module)
    for packed, out in _PACKED:
        if {packed, out} <= children:
            inner, wide = features_of(module.get_submodule(packed))
            if head_size and wide == 3 * inner and inner % head_size == 0:
                return Projections((packed,), 3, out, inner // head_size)
    for ins, outs in _SEPARATE:
        if set(ins) <= children and head_size:
            widths = [features_of(module.get_submodule(n))[1] for n in ins]
            if any(w % head_size for w in widths):
                return None
            heads = gcd(*(w // head_size for w in widths))
            return Projections(ins, 1, next((o for o in outs if o in children), None), heads)
    return None


def _head_size(module: nn.Module) -> int | None:
    for name in _HEAD_SIZES:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


class AttentionRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """A pair where the output projection is inside, else column."""
        module = model.get_submodule(modules[0])
        found = projections_of(module)
        if found is None or len(modules) > 1:
            return []
        cuts: list[ParameterCut] = []
        for name in found.ins:
            child = module.get_submodule(name)
            dims = {"weight": out_dim(child), "bias": 0}
            cuts += cuts_of(model, qualified(modules[0], name), dims, found.blocks)
        first = module.get_submodule(found.ins[0])
        features = features_of(first)[1] // found.blocks
        if found.out is None:
            return [SplitSpec("column", found.heads, False, features, -1, tuple(cuts))]
        last = module.get_submodule(found.out)
        cuts += cuts_of(model, qualified(modules[0], found.out), {"weight": 1 - out_dim(last)})
        return [SplitSpec("pair", found.heads, False, features_of(last)[1], -1, tuple(cuts))]

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, degree: int, reduce: Reduce
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        found = projections_of_cut(module)
        for name in found.ins:
            sync_width(module.get_submodule(name))
        for attribute in (*_HEAD_COUNTS, *_WIDTHS):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and value % degree == 0:
                setattr(module, attribute, value // degree)
        if found.out is not None:
            patch_row(module.get_submodule(found.out), reduce)


def projections_of_cut(module: nn.Module) -> Projections:
    """As ``projections_of``, by names alone: the weights have been cut already."""
    children = {name for name, child in module.named_children() if is_linear(child)}
    for packed, out in _PACKED:
        if {packed, out} <= children:
            return Projections((packed,), 3, out, 0)
    for ins, outs in _SEPARATE:
        if set(ins) <= children:
            return Projections(ins, 1, next((o for o in outs if o in children), None), 0)
    raise AssertionError("a module without projections was given to the attention recipe")
