"""How modules with children are divided: attention by heads, MLPs by columns and then by rows.

Attention has its queries, keys and values cut by columns, the output projection by rows. It is
recognised by the names of its projections, which most code shares: packed (``c_attn``), or
``q_proj``, ``k_proj``, ``v_proj`` (``query``, ``key``, ``value``), with the output projection
inside the module (``pair``) or, as in BERT, in another (``column``: the mixed heads are left as
features for it). The module's own forward runs on fewer heads; attention weights, where it returns
them beside its result, are left out of a divided unit's output. ``nn.MultiheadAttention`` gets a
forward of our own, because its own passes all weights to one function that takes them whole.

An MLP is linear layers, elementwise functions, one more linear layer; nothing is exchanged between
them. It is recognised by the module's children: two linear layers, or three where two make the
factors of a product (gated units), the last as wide at its input as the others at their outputs,
all else elementwise.

That a module that looks so works so is checked numerically (see [Note: Splits are proved] in
models/splits/check.py).
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.cost.ownership import feature_bounds
from ..spec import ParameterCut, Reduce, SplitSpec
from .leaves import features_of, is_elementwise, is_linear, out_dim, patch_row, sync_width
from .recipe import GroupMember, Modules, cuts_of, qualified


class Names(NamedTuple):
    """Names of an attention module's projections: ``ins`` by columns (a single one holds queries,
    keys and values, a third each), ``out`` by rows if it lies in the module."""

    ins: tuple[str, ...]
    out: str | None

    @property
    def blocks(self) -> int:
        return 3 if len(self.ins) == 1 else 1


# As GPT-2, timm, Llama, OPT, DistilBERT, Meta's own Llama and BERT call them, among others.
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
# Attributes that hold the count of heads times their size.
_WIDTHS = ("split_size", "all_head_size")
# Parameters with a number for each head: the logit to which attention may go instead of to a token.
_OF_HEADS = ("sinks",)


def _names_of(module: nn.Module) -> Names | None:
    linear = {name for name, child in module.named_children() if is_linear(child)}
    for names in _KNOWN:
        if {*names.ins, *filter(None, [names.out])} <= linear:
            return names
    return None


def pair_cuts(
    name: str, module: nn.Module, ins: Sequence[str], out: str | None, blocks: int = 1
) -> tuple[ParameterCut, ...]:
    """Cuts of the layers ``ins`` of a module by columns and of ``out``, if it is there, by rows."""
    cuts: list[ParameterCut] = []
    for layer in ins:
        child = module.get_submodule(layer)
        dims = {"weight": out_dim(child), "bias": 0}
        cuts += cuts_of(qualified(name, layer), child, dims, blocks)
    if out is not None:
        last = module.get_submodule(out)
        cuts += cuts_of(qualified(name, out), last, {"weight": 1 - out_dim(last)})
    return tuple(cuts)


def _patch(module: nn.Module, ins: Sequence[str], out: str | None, reduce: Reduce) -> None:
    for layer in ins:
        sync_width(module.get_submodule(layer))
    if out is not None:
        patch_row(module.get_submodule(out), reduce)


class AttentionRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """A pair where the output projection is inside, else column."""
        (root, module), *rest = modules.items()
        names = _names_of(module)
        heads = _heads(module, names) if names else 0
        if names is None or heads < 2 or rest:
            return []
        cuts = pair_cuts(root, module, names.ins, names.out, names.blocks)
        cuts = (*cuts, *cuts_of(root, module, dict.fromkeys(_OF_HEADS, 0)))
        if names.out is None:
            width = features_of(module.get_submodule(names.ins[0]))[1]
            return [SplitSpec("column", heads, False, width, -1, cuts)]
        width = features_of(module.get_submodule(names.out))[1]
        return [SplitSpec("pair", heads, False, width, -1, cuts)]

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        (module,) = modules.values()
        names = _names_of(module)
        assert names is not None
        _patch(module, names.ins, names.out, member.reduce)
        # Forwards reshape by these attributes, so they must be those of the member's heads.
        for attribute in (*_HEAD_COUNTS, *_WIDTHS):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and value % member.degree == 0:
                setattr(module, attribute, value // member.degree)
        _return_first_only(module)


def _heads(module: nn.Module, names: Names) -> int:
    """Into how many pieces the heads can be divided, 0 where the widths do not fit the size of a
    head."""
    sizes = [getattr(module, name, None) for name in _HEAD_SIZES]
    size = next((s for s in sizes if isinstance(s, int) and s > 0), None)
    if size is None:
        return 0
    widths = [features_of(module.get_submodule(name))[1] for name in names.ins]
    if any(width % (size * names.blocks) for width in widths):
        return 0
    # Several queries may share the keys of one head: there are as many pieces as heads of keys.
    return gcd(*(width // (size * names.blocks) for width in widths))


def _return_first_only(module: nn.Module) -> None:
    original = module.forward

    # What else it returns, attention weights, are of the member's heads only.
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(output)
        return pytree.tree_unflatten([leaves[0], *(None for _ in leaves[1:])], structure)

    module.forward = forward


class MultiheadRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """A pair, for packed projections with nothing added to the keys."""
        (name, module), *rest = modules.items()
        if type(module) is not nn.MultiheadAttention or rest:
            return []
        plain = module.bias_k is None and not module.add_zero_attn
        if not (plain and module._qkv_same_embed_dim):
            return []
        packed = {"in_proj_weight": 0, "in_proj_bias": 0}
        cuts = (
            *cuts_of(name, module, packed, blocks=3),
            *cuts_of(qualified(name, "out_proj"), module.out_proj, {"weight": 1}),
        )
        return [SplitSpec("pair", module.num_heads, False, module.embed_dim, -1, cuts)]

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        (module,) = modules.values()
        assert isinstance(module, nn.MultiheadAttention)
        patch_row(module.out_proj, member.reduce)
        heads = slice(*feature_bounds(module.num_heads, member.degree, member.index))
        module.forward = _forward(module, heads)  # type: ignore[method-assign]
        # torch's encoder layer reads the weights itself where it thinks that they are whole.
        module._qkv_same_embed_dim = False


def _forward(module: nn.MultiheadAttention, heads: slice) -> Callable[..., tuple[Tensor, None]]:
    """Attention of some of the heads; arguments as torch's."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        # Queries, keys and values, a third each: they are cut alike, so a member's are thirds too.
        inputs = (query, key, value)
        # [sample, position, width]
        if not module.batch_first:
            inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        # Each [sample, head, position, size]. The number of heads is said, as torch could not tell
        # it of a group that has no samples.
        own = len(weights[0]) // module.head_dim
        q, k, v = (
            F.linear(x, w, b).view(*x.shape[:-1], own, module.head_dim).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        mask = _mask(attn_mask, key_padding_mask, len(inputs[0]), heads, query.dtype)
        dropout = module.dropout if module.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).flatten(2)
        # As it was given: the sums in the projection are over samples in that dimension.
        return module.out_proj(mixed if module.batch_first else mixed.transpose(0, 1)), None

    return forward


def _mask(
    scores: Tensor | None, padding: Tensor | None, samples: int, heads: slice, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores [sample, head, to, from]. ``scores`` is [to, from] or, with all
    heads of all samples in dim 0, [·, to, from]; ``padding`` is [sample, from]."""
    parts = []
    if scores is not None:
        per_head = scores.dim() == 3
        every = len(scores) // samples if samples else heads.stop
        whole = scores.view(samples, every, *scores.shape[1:]) if per_head else scores
        parts.append(whole[:, heads] if per_head else whole)
    if padding is not None:
        parts.append(padding[:, None, None, :])
    added = [
        # True means "do not look".
        torch.zeros_like(part, dtype=dtype).masked_fill(part, float("-inf"))
        if part.dtype == torch.bool
        else part.to(dtype)
        for part in parts
    ]
    return sum(added[1:], added[0]) if added else None


def layers_of(module: nn.Module) -> tuple[list[str], str] | None:
    """Names of the first layers and of the last of a module that looks like an MLP, else None."""
    children = list(module.named_children())
    *firsts, last = [name for name, child in children if is_linear(child)] or [""]
    rest = [child for _, child in children if not is_linear(child)]
    own = next(module.parameters(recurse=False), None)
    if len(firsts) not in (1, 2) or own is not None or not all(is_elementwise(c) for c in rest):
        return None
    return firsts, last


class MLPRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """A pair, if it is one."""
        (root, module), *rest = modules.items()
        found = layers_of(module)
        if found is None or rest or isinstance(module, nn.Sequential):
            return []
        inner, outputs = features_of(module.get_submodule(found[1]))
        shapes = {features_of(module.get_submodule(name)) for name in found[0]}
        if len(shapes) != 1 or shapes.pop()[1] != inner:
            return []
        return [SplitSpec("pair", inner, True, outputs, -1, pair_cuts(root, module, *found))]

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        (module,) = modules.values()
        found = layers_of(module)
        assert found is not None
        _patch(module, *found, member.reduce)
