"""What a model is given and what it returns, opened down to its tensors: all that torch flattens,
dataclasses, dicts of other classes, and objects: a ``torch.distributions.Normal``, or one of the
user's that has the logits as an attribute."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils import _pytree as pytree  # torch has no public name for it

from .trees import leaves_of

# How deep objects are opened, in one another. One of the user's may know all others in the end (its
# trainer, say), so a few of these; dataclasses and distributions hold values, of a mixture of
# independent normal distributions in an output some more.
_DEPTH, _OBJECT, _VALUES = 24, 8, 3
_CLOSED = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


def leaves_in(tree: Any) -> list[Any]:
    """The leaves of a tree in order, those inside dataclasses and objects that hold tensors too."""
    return _leaves(tree, _DEPTH)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, Tensor)]


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with ``change`` of each of its leaves, in the order of ``leaves_in``. Objects in
    which something changes are copied, all others stay the same object: the user may know them by
    identity."""
    return _mapped(tree, change, _DEPTH)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    return mapped(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def _leaves(tree: Any, depth: int) -> list[Any]:
    found = []
    for leaf in leaves_of(tree):
        inner = _inner(leaf, depth)
        found += [leaf] if inner is None else _leaves(list(inner.values()), depth - _cost(leaf))
    return found


def _mapped(tree: Any, change: Callable[[Any], Any], depth: int) -> Any:
    def one(leaf: Any) -> Any:
        inner = _inner(leaf, depth)
        if inner is None:
            return change(leaf)
        left = depth - _cost(leaf)
        new = {name: _mapped(value, change, left) for name, value in inner.items()}
        if all(new[name] is value for name, value in inner.items()):
            return leaf
        return _with(leaf, new)

    return pytree.tree_map(one, tree)


def _inner(leaf: Any, depth: int) -> Mapping[Any, Any] | None:
    """What an object holds, by name; None of one that is not opened."""
    if leaf is None or isinstance(leaf, _CLOSED) or depth < _cost(leaf):
        return None
    if isinstance(leaf, dict):
        return leaf
    if dataclasses.is_dataclass(leaf):
        names = [field.name for field in dataclasses.fields(leaf)]
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    held = getattr(leaf, "__dict__", None)
    if not held or _of_torch(type(leaf)):
        return None
    # Only where it is worth it: what holds no tensor is a leaf as it is.
    left = depth - _cost(leaf)
    inside = any(isinstance(t, Tensor) for t in _leaves(list(held.values()), left))
    return dict(held) if inside else None


def _cost(leaf: Any) -> int:
    """What opening an object takes of the depth."""
    values = isinstance(leaf, dict | Distribution) or dataclasses.is_dataclass(leaf)
    return _VALUES if values else _OBJECT


def _of_torch(cls: type) -> bool:
    """Whether torch made the class for something else than values (a generator, an optimizer)."""
    package = cls.__module__
    return package.split(".")[0] == "torch" and not package.startswith("torch.distributions")


def _with(leaf: Any, values: Mapping[Any, Any]) -> Any:
    """A copy of the object that holds these values."""
    made = copy.copy(leaf)
    for name, value in values.items():
        if isinstance(made, dict):
            made[name] = value
        elif name in getattr(made, "__dict__", ()):
            made.__dict__[name] = value  # past properties, and those that are frozen
        else:
            object.__setattr__(made, name, value)  # with slots
    return made
