"""Parameters whose update is still on its way: whatever reads or changes one waits for it first.

While its update is pending, a parameter's class is a subclass with ``__torch_function__``. Its
unit's forward is the usual first touch; a moving average, a norm, ``state_dict`` or ``.data`` wait
as well. Afterwards the class is its own again, so that nothing costs more than a class assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from .metadata import METADATA

_FINISH = "_meshwright_finish"


class Pending:
    """Mixed into the class of a parameter whose update has not been applied yet."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OUTSIDE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Pending):
                leaf._finish_beside(leaves)
        return func(*args, **(kwargs or {}))

    def _finish_beside(self, leaves: list[Any]) -> None:
        """Waits, as one of the arguments of a function."""
        finish(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        return self.__deepcopy__(memo)  # its own class's

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        return self.__reduce_ex__(protocol)


def suspend(
    parameter: nn.Parameter, apply: Callable[[], None], kind: type[Pending] = Pending
) -> None:
    """Makes ``parameter`` wait: the first touch calls ``apply()``, which must ``resume`` it.
    ``kind`` is what is mixed into its class meanwhile."""
    parameter.__dict__[_FINISH] = apply
    parameter.__class__ = _pending_class(type(parameter), kind)  # type: ignore[arg-type]


def resume(parameter: nn.Parameter) -> None:
    """The parameter is as any other again."""
    if isinstance(parameter, Pending):
        del parameter.__dict__[_FINISH]
        classes: Any = type(parameter).__mro__  # ours and the mixins, then its own
        parameter.__class__ = next(c for c in classes if not issubclass(c, Pending))


def finish(parameter: Any) -> None:
    """Waits for the update of a pending parameter."""
    parameter.__dict__[_FINISH]()


def bare(parameter: nn.Parameter) -> Tensor:
    """The parameter's memory as it is now, which autograd does not follow; waits for nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


@cache
def _pending_class(own: type, kind: type[Pending]) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


_GRAD: Any = Tensor.grad
OUTSIDE = METADATA | {
    _GRAD.__get__,
    _GRAD.__set__,
    _GRAD.__delete__,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}
"""What does not read or change the values."""
