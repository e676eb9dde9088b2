"""Attention by heads: queries, keys and values by columns, the output projection by rows.

Recognised by the names of their projections, which most code shares: packed (``c_attn``), or
``q_proj``, ``k_proj``, ``v_proj`` (``query``, ``key``, ``value``), with the output projection
inside the module (``pair``) or, as in BERT, in another (``column``: the mixed heads are left as
features for it). The module's own forward runs on fewer heads. That a module of these names works
so is checked numerically before a split is offered.

Attention weights, where a module returns them beside its result, are of the member's heads only;
they are left out of a divided unit's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from torch import nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..spec import ParameterCut, SplitSpec
from .linear import features_of, is_linear, out_dim, patch_row, sync_width
from .recipe import Place, cuts_of, qualified


class Names(NamedTuple):
    """Names of an attention module's projections: ``ins`` by columns (a single one holds queries,
    keys and values, a third each), ``out`` by rows if it lies in the module."""

    ins: tuple[str, ...]
    out: str | None

    @property
    def blocks(self) -> int:
        """How many equal blocks one input projection packs."""
        return 3 if len(self.ins) == 1 else 1


_KNOWN = (
    Names(("c_attn",), "c_proj"),
    Names(("qkv",), "proj"),
    Names(("in_proj",), "out_proj"),
    Names(("q_proj", "k_proj", "v_proj"), "o_proj"),
    Names(("q_proj", "k_proj", "v_proj"), "out_proj"),
    Names(("q_lin", "k_lin", "v_lin"), "out_lin"),
    Names(("wq", "wk", "wv"), "wo"),
    Names(("query", "key", "value"), None),
)
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_heads", "heads", "n_heads")
_HEAD_SIZES = ("head_dim", "attention_head_size")
_WIDTHS = ("split_size", "all_head_size")
"""Attributes that hold the count of heads times their size."""


def _names_of(module: nn.Module) -> Names | None:
    linear = {name for name, child in module.named_children() if is_linear(child)}
    for names in _KNOWN:
        if {*names.ins, *filter(None, [names.out])} <= linear:
            return names
    return None


class AttentionRecipe:
    """See the module's docstring."""

    def specs(self, model: nn.Module, modules: Sequence[str]) -> list[SplitSpec]:
        """A pair where the output projection is inside, else column."""
        module = model.get_submodule(modules[0])
        names = _names_of(module)
        heads = _heads(module, names) if names else 0
        if names is None or heads < 2 or len(modules) > 1:
            return []
        cuts: list[ParameterCut] = []
        for name in names.ins:
            dims = {"weight": out_dim(module.get_submodule(name)), "bias": 0}
            cuts += cuts_of(model, qualified(modules[0], name), dims, names.blocks)
        if names.out is None:
            width = features_of(module.get_submodule(names.ins[0]))[1]
            return [SplitSpec("column", heads, False, width, -1, tuple(cuts))]
        last = module.get_submodule(names.out)
        cuts += cuts_of(model, qualified(modules[0], names.out), {"weight": 1 - out_dim(last)})
        return [SplitSpec("pair", heads, False, features_of(last)[1], -1, tuple(cuts))]

    def patch(
        self, model: nn.Module, modules: Sequence[str], spec: SplitSpec, place: Place
    ) -> None:
        """See ``Recipe.patch``."""
        module = model.get_submodule(modules[0])
        names = _names_of(module)
        assert names is not None
        for name in names.ins:
            sync_width(module.get_submodule(name))
        for attribute in (*_HEAD_COUNTS, *_WIDTHS):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and value % place.degree == 0:
                setattr(module, attribute, value // place.degree)
        if names.out is not None:
            patch_row(module.get_submodule(names.out), place.reduce)
        _leave_first_alone(module)


def _heads(module: nn.Module, names: Names) -> int:
    """Into how many pieces the heads can be divided (with fewer keys than queries: the keys'), 0
    where the widths do not fit the size of a head."""
    sizes = [getattr(module, name, None) for name in _HEAD_SIZES]
    size = next((s for s in sizes if isinstance(s, int) and s > 0), None)
    if size is None:
        return 0
    widths = [features_of(module.get_submodule(name))[1] for name in names.ins]
    if any(width % (size * names.blocks) for width in widths):
        return 0
    return gcd(*(width // (size * names.blocks) for width in widths))


def _leave_first_alone(module: nn.Module) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(output)
        return pytree.tree_unflatten([leaves[0], *(None for _ in leaves[1:])], structure)

    module.forward = forward
