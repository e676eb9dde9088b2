"""A parameter whose elements are shared among the peers and whose memory is free (or may be soon).

Whatever touches it puts it together, on every rank in one order. Saving and loading do not: what is
saved is this rank's chunk (``LocalChunk``), and a whole that is copied into it goes to the chunk.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.schema.errors import RunError
from .pending import OUTSIDE, Pending

USE = "_meshwright_use"
"""Where a parameter keeps who looks after it."""
SAVING = "_meshwright_saving"
"""Where it keeps what stands for it in a ``state_dict``, while one is made."""

_VERSION: Any = Tensor._version
_OUTSIDE = OUTSIDE | {_VERSION.__get__, Tensor.is_inference}
"""What does not need the memory. The version counts a step when that is called."""


class ResharedParam(Pending):
    """Mixed into the class of such a parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OUTSIDE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        plain_copy = func is Tensor.copy_ and not torch.is_grad_enabled()
        if plain_copy and isinstance(args[0], ResharedParam) and _copied(*args[:2]):
            return args[0]
        if func is Tensor.detach and SAVING in args[0].__dict__:
            return args[0].__dict__[SAVING]
        leaves = pytree.tree_leaves((args, kwargs))
        with _touching(next((t for t in leaves if isinstance(t, ResharedParam)), None)):
            return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _touching(self):
            return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _touching(self):
            return super().__reduce_ex__(protocol)

    def _finish_beside(self, leaves: list[Any]) -> None:
        """All of them together: one must not be freed for another."""
        myself: Any = self
        used = use_of(myself)
        if used is None:
            raise RunError(
                f"a parameter of shape {list(myself.shape)} is read whose model is gone, and with "
                "it what other ranks have of it: keep the model as long as its parameters"
            )
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        mine = [use_of(t) for t in tensors if isinstance(t, ResharedParam)]
        fetcher = used.fetcher
        fetcher.touch([u.grad_group for u in mine if u and u.fetcher is fetcher], tensors)


class Use(NamedTuple):
    """Who looks after a parameter."""

    fetcher: Any
    grad_group: Any
    entry: Any


class Keeper:
    """The same, as the parameter knows it. It is not saved with the parameter."""

    def __init__(self, fetcher: Any, grad_group: Any, entry: Any) -> None:
        # Weak: the parameter may outlive them.
        self._fetcher, self._parcel, self._entry = (
            weakref.ref(fetcher),
            weakref.ref(grad_group),
            entry,
        )

    def use(self) -> Use | None:
        """Who they are, if they are still there."""
        fetcher, grad_group = self._fetcher(), self._parcel()
        return (
            None if fetcher is None or grad_group is None else Use(fetcher, grad_group, self._entry)
        )

    def __call__(self) -> None:
        """Makes the parameter whole."""
        used = self.use()
        if used is not None:
            used.fetcher.touch([used.grad_group], ())

    def __reduce__(self) -> Any:
        return bool, ()


def use_of(parameter: Tensor) -> Use | None:
    """Who looks after a parameter that is fully sharded; None where it is not."""
    keeper = parameter.__dict__.get(USE)
    return keeper.use() if isinstance(keeper, Keeper) else None


def _touching(parameter: Any) -> AbstractContextManager[None]:
    """Something touches that parameter, and perhaps others: for so long only."""
    used = use_of(parameter) if parameter is not None else None
    around: AbstractContextManager[None] = used.fetcher.around_touch() if used else nullcontext()
    return around


def _copied(target: Any, source: Any) -> bool:
    """Copies a whole tensor into the chunk of ``target``; False where that is not what it is."""
    if source is target:
        return True
    used = use_of(target)
    if used is None or not isinstance(source, Tensor) or isinstance(source, Pending):
        return False
    if source.shape != target.shape or source.is_meta:
        return False
    chunk = used.fetcher.chunk(used.grad_group, used.entry)
    sharing = used.grad_group.sharings[used.entry]
    chunk.copy_(sharing.part(source.to(chunk.device, chunk.dtype)))
    torch.autograd.graph.increment_version(target)
    return True
