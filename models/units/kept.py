"""Results of a forward that modules keep as attributes: a loss of a layer's own, say."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

_OWN = frozenset(vars(nn.Module()))
# What old weight normalisation and pruning call the parameters that a kept one is computed from.
_SOURCES = ("_orig", "_g")


def has_graph(leaf: object) -> bool:
    """Whether a gradient can go back from something."""
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def empty_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their attributes that may come to hold what a forward makes: they
    have nothing now, a zero or a tensor without a graph."""
    for module in model.modules():
        for name, value in _attributes(module):
            if isinstance(value, Tensor):
                empty = not has_graph(value)
            elif isinstance(value, int | float | list | tuple | dict):
                empty = not value and not isinstance(value, bool)
            else:
                empty = value is None
            if empty:
                yield module, name


def kept_results(
    model: nn.Module, is_result: Callable[[object], bool] = has_graph
) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their attributes that hold what a forward made: tensors with a
    graph, by themselves or in lists, tuples and dicts."""
    for module in model.modules():
        for name, value in _attributes(module):
            if not isinstance(value, Tensor | list | tuple | dict):
                continue
            if any(is_result(leaf) for leaf in pytree.tree_leaves(value)):
                yield module, name


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """A module's attributes that every module does not have, but for what is computed from its
    parameters before each forward."""
    for name, value in vars(module).items():
        computed = any(name + source in module._parameters for source in _SOURCES)
        if name not in _OWN and not computed:
            yield name, value
