"""How mixtures of experts are divided: every expert by columns and then by rows, the router whole.

The block that holds the experts is one unit, from its input to the sum of what the experts say.
Each member has a part of the inner features of *every* expert, and of the experts that all samples
share, so all members are equally busy whatever the router chooses. They route alike, as they see
the same samples; what they add up are partial sums, reduced once at the end of the block. The
gradient of the router is then a sum over the members, as that of all parameters that are not cut.

Experts are modules that look like MLPs, in a list, or one module that has the weights of all of
them, the expert in dimension 0, as transformers and others store them for grouped products. A gate
and a product that are packed are taken to follow one another, but to alternate where they have
biases (gpt-oss has them so). That a block that looks so works so is checked numerically (see [Note:
Splits are proved] in models/splits/check.py).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from torch import nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.cost.ownership import feature_bounds
from ..spec import ParameterCut, SplitSpec
from .blocks import layers_of, pair_cuts
from .leaves import features_of, sync_width
from .recipe import GroupMember, Modules, qualified

# Names of the weights of all experts: those by columns, and the one by rows.
_STACKED = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w13",), "w2"),
)
# Attributes with the count of an expert's inner features, by which forwards slice and reshape.
_WIDTHS = (
    "intermediate_size",
    "intermediate_dim",
    "moe_intermediate_size",
    "expert_dim",
    "ffn_dim",
)


class _Cut(NamedTuple):
    """The cuts of one module inside the block, its inner features and its outputs, and whether
    members may have different numbers of features."""

    cuts: tuple[ParameterCut, ...]
    inner: int
    outputs: int
    uneven: bool = True


class ExpertsRecipe:
    def specs(self, modules: Modules) -> list[SplitSpec]:
        """A pair, if the module holds experts and nothing else that is not shared by all."""
        (root, module), *rest = modules.items()
        if rest or not any(_holds(name, child) for name, child in module.named_children()):
            return []
        found = list(_cuts(root, module))
        outputs = {cut.outputs for cut in found}
        if len(outputs) != 1:
            return []
        cuts = tuple(cut for one in found for cut in one.cuts)
        inner, uneven = min(f.inner for f in found), all(f.uneven for f in found)
        return [SplitSpec("pair", inner, uneven, outputs.pop(), -1, cuts)]

    def patch(self, modules: Modules, spec: SplitSpec, member: GroupMember) -> None:
        (module,) = modules.values()
        for inner in module.modules():
            if (names := layers_of(inner)) is not None:
                for name in names[0]:
                    sync_width(inner.get_submodule(name))
            if (shape := _stacked(inner)) is not None:
                _narrow(inner, shape, member)
                _share_bias(inner, f"{shape.out}_bias", member.degree)
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = pytree.tree_flatten(original(*args, **kwargs))
            # What else it returns, the router's scores, is of all members alike.
            rest = [None for _ in leaves[1:]]
            return pytree.tree_unflatten([member.reduce(leaves[0]), *rest], structure)

        module.forward = forward


def _holds(name: str, child: nn.Module) -> bool:
    """Whether a child of a block has its experts."""
    # By the name too: a list of MLPs may be a network of them, one after the other.
    items = list(child.children()) if isinstance(child, nn.ModuleList) and "expert" in name else []
    listed = len(items) > 1 and all(layers_of(item) for item in items)
    return listed or _stacked(child) is not None


def _cuts(root: str, module: nn.Module) -> Iterator[_Cut]:
    """The cuts of all experts in a block, shared ones too."""
    for name, inner in module.named_modules(prefix=root):
        if (shape := _stacked(inner)) is not None:
            yield shape.cut(name)
        names = layers_of(inner) if inner is not module else None
        if names is None:
            continue
        firsts, last = [inner.get_submodule(n) for n in names[0]], inner.get_submodule(names[1])
        width, outputs = features_of(last)
        # A bias after the sum would be added by every member.
        if last.bias is not None or any(features_of(first)[1] != width for first in firsts):
            continue
        yield _Cut(pair_cuts(name, inner, *names), width, outputs)


class _Stacked(NamedTuple):
    """Where the inner features are in the weights of all experts: dimensions, and how many blocks
    are packed in those by columns (a gate's and a product's); the biases of these."""

    ins: tuple[str, ...]
    biases: tuple[str, ...]
    out: str
    in_dim: int
    out_dim: int
    blocks: int
    inner: int
    outputs: int

    def cut(self, name: str) -> _Cut:
        interleaved = self.blocks > 1 and bool(self.biases)
        blocks = 1 if interleaved else self.blocks
        cuts = [ParameterCut(qualified(name, n), self.in_dim, blocks) for n in self.ins]
        cuts += [ParameterCut(qualified(name, n), 1, blocks) for n in self.biases]
        cuts.append(ParameterCut(qualified(name, self.out), self.out_dim))
        # A feature's gate and product stay together only where all members have equally many.
        return _Cut(tuple(cuts), self.inner, self.outputs, not interleaved)


def _stacked(module: nn.Module) -> _Stacked | None:
    """The weights of all experts, where the module has those, perhaps their biases, and no other
    parameters."""
    own = dict(module.named_parameters(recurse=False))
    for ins, out in _STACKED:
        biases = {f"{name}_bias" for name in (*ins, out)} & set(own)
        ranks = {name: 2 if name in biases else 3 for name in (*ins, out, *biases)}
        if {name: p.ndim for name, p in own.items()} != ranks:
            continue
        # As a linear layer has them, [expert, out, in], or the other way round; a packed one first.
        # Where nothing is packed both may fit the shapes: then it is taken for the usual one.
        for (cut, kept), blocks in product(((1, 2), (2, 1)), (2, 1) if len(ins) == 1 else (1,)):
            inner, outputs = own[out].shape[kept], own[out].shape[cut]
            if own[ins[0]].shape[cut] == blocks * inner and own[ins[0]].shape[kept] == outputs:
                by_columns = tuple(sorted(biases - {f"{out}_bias"}))
                return _Stacked(ins, by_columns, out, cut, kept, blocks, inner, outputs)
    return None


def _share_bias(module: nn.Module, name: str, degree: int) -> None:
    """Lets every member add its share of the bias that follows the sum, if there is one."""
    if getattr(module, name, None) is None:
        return
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # An attribute of the instance is found before a parameter of that name.
        vars(module)[name] = module.get_parameter(name) / degree
        try:
            return original(*args, **kwargs)
        finally:
            del vars(module)[name]

    module.forward = forward


def _narrow(module: nn.Module, part: _Stacked, member: GroupMember) -> None:
    """Tells a module of stacked experts, whose weights have been cut, how many inner features it
    has now."""
    for attribute in _WIDTHS:
        whole = getattr(module, attribute, None)
        if isinstance(whole, int):
            left, right = feature_bounds(whole, member.degree, member.index)
            if right - left == part.inner:
                setattr(module, attribute, right - left)
