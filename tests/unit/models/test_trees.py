"""Trees are opened and changed as torch does it."""

from collections import OrderedDict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.models.trees import leaves_of, map_only
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Pair = namedtuple("Pair", "one other")


class Own(Tensor):
    """A tensor of another class."""


def _node(inside):
    keys = st.text(max_size=2)
    return st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(keys, inside, max_size=3),
        st.dictionaries(keys, inside, max_size=3).map(OrderedDict),
        st.builds(Pair, inside, inside),
    )


TENSORS = st.sampled_from(
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Own)]
)
LEAVES = st.one_of(TENSORS, st.none(), st.integers(), st.floats(allow_nan=False), st.text(),
                   st.sets(st.integers()), st.just(torch.float32))  # fmt: skip
TREES = st.recursive(LEAVES, _node, max_leaves=8)


def same(some, others):
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


@given(TREES)
def test_leaves(tree):
    assert same(leaves_of(tree), pytree.tree_leaves(tree))


@given(TREES, st.sampled_from([Tensor, Own, int]))
def test_leaves_of_a_kind_are_changed(tree, kind):
    changed, expected = map_only(kind, str, tree), pytree.tree_map_only(kind, str, tree)
    assert pytree.tree_structure(changed) == pytree.tree_structure(expected)
    for one, other in zip(pytree.tree_leaves(changed), pytree.tree_leaves(expected), strict=True):
        assert one is other or one == other
