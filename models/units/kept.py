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


def kept_results(
    model: nn.Module, is_result: Callable[[object], bool] = has_graph
) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their attributes that hold what a forward made: tensors with a
    graph, by themselves or in lists, tuples and dicts; none that is computed from the module's
    parameters before each forward."""
    for module in model.modules():
        for name, value in vars(module).items():
            computed = any(name + source in module._parameters for source in _SOURCES)
            if name in _OWN or computed or not isinstance(value, Tensor | list | tuple | dict):
                continue
            if any(is_result(leaf) for leaf in pytree.tree_leaves(value)):
                yield module, name
