"""Trees of arguments and outputs as torch flattens them (``torch.utils._pytree``), in a quicker way
where they are plain: tuples, lists and dicts. They are opened at every module and every call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

# Subclasses may be flattened in another way.
_LEAVES = frozenset({int, float, bool, str, type(None)})


def map_only(kind: type | tuple[type, ...], change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with ``change`` of each leaf that is of ``kind``."""
    if isinstance(tree, kind):
        return change(tree)
    cls = type(tree)
    if cls in _LEAVES or isinstance(tree, Tensor):
        return tree
    if cls is tuple:
        return tuple([map_only(kind, change, part) for part in tree])
    if cls is list:
        return [map_only(kind, change, part) for part in tree]
    if cls is dict:
        return {key: map_only(kind, change, part) for key, part in tree.items()}
    return pytree.tree_map_only(kind, change, tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves in order, as ``torch.utils._pytree.tree_leaves`` gives them."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    cls = type(tree)
    if cls in _LEAVES or isinstance(tree, Tensor):
        found.append(tree)
    elif cls is tuple or cls is list:
        for part in tree:
            _collect(part, found)
    elif cls is dict:
        for part in tree.values():
            _collect(part, found)
    else:
        found += pytree.tree_leaves(tree)
