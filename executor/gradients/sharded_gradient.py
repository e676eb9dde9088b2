"""The gradient of a parameter whose exchange is sharded: this rank has the averages of its chunk.

It answers what can be answered from the chunks (norms over all of them, by one small all-reduce;
scaling), so that unmodified clipping by norm costs no more than elsewhere. Whatever else touches it
puts the whole together. Both are collective among those who hold elements, so that a gradient must
be asked for on every rank in one order; a rank that asks alone gets an error after the time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..redistribution.shard_gradient import ShardGradient
from .flat_shard import FlatShardSpec
from .waiting import Vacate, WaitingGradient, stand_in


class ShardedGradient(WaitingGradient):
    """Stands in ``grad`` in the parameter's shape."""

    _sharing: FlatShardSpec
    _part: Tensor
    _settle: Callable[[], None]

    @staticmethod
    def standing(
        sharing: FlatShardSpec, part: Tensor, settle: Callable[[], None], vacate: Vacate
    ) -> ShardedGradient:
        """A stand-in for the gradient whose chunk is in ``part`` once ``settle()`` has waited.
        ``vacate`` gives zeros that stand in its place."""
        waiting = stand_in(ShardedGradient, sharing.shape, sharing.stride, part)
        waiting.taken, waiting._gradient, waiting._vacate = False, None, vacate
        waiting._sharing, waiting._part, waiting._settle = sharing, part, settle
        waiting._arrive = None
        return waiting

    def part(self) -> Tensor:
        """This rank's elements; waits for them."""
        if self._gradient is not None:
            return self._sharing.part(self._gradient)
        self._settle()
        return self._part

    def taken_over(self) -> Tensor:
        """This rank's elements for a step, once they have come. Whatever is done to the gradient
        from now on waits until the step has used them, or does not change them."""
        self.taken = True
        return self._part if self._gradient is None else self._sharing.part(self._gradient).clone()

    def complete(self) -> Tensor:
        """The whole gradient. Collective over the peers the first time."""
        if self._gradient is None:
            whole = self._sharing.whole(self.part())
            divided = self._sharing.divided
            self._gradient = whole if divided is None else ShardGradient.of(whole, divided)
        return self._gradient

    def clear(self) -> None:
        """Zeros from now on; nothing is waited for."""
        if self._gradient is None:
            self._gradient = self._vacate(self)
        else:
            self._gradient.zero_()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_norm(func, args, kwargs) or _scaling(func, args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)
        result = func(*_as_parts(args), **kwargs)
        return args[0] if func in _SCALE_ONE else result


def _as_parts(tree: Any) -> Any:
    """Stand-ins replaced by this rank's elements where only these are there, which know the norm
    of the whole; by gradients elsewhere."""

    def part(gradient: WaitingGradient) -> Tensor:
        if isinstance(gradient, ShardedGradient) and not gradient.arrived:
            return gradient._sharing.shown(gradient.part())
        return gradient.complete()

    return pytree.tree_map_only(WaitingGradient, part, tree)


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for norms of whole gradients that combine from their chunks'."""
    told = {key for key, value in kwargs.items() if value is not None and value is not False}
    if func not in _ORDERS or len(args) > 2 or not told <= {"ord", "p", "dtype"}:
        return False
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", _ORDERS[func]))
    if func is torch.linalg.norm:
        return order is None
    if order is None or order == "fro":
        return func in (torch.norm, Tensor.norm)
    return isinstance(order, int | float) and order >= 0


def _scaling(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call multiplies gradients in place by one number."""
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        return True
    if func not in _SCALE_ONE and func not in _SCALE_ALL:
        return False
    one = isinstance(args[1], int | float) or (isinstance(args[1], Tensor) and args[1].ndim == 0)
    return one and len(args) == 2 and not kwargs and not isinstance(args[1], WaitingGradient)


_ORDERS: dict[Any, Any] = {
    torch.linalg.vector_norm: 2,
    torch.linalg.norm: None,
    torch.norm: "fro",
    Tensor.norm: "fro",
    torch._foreach_norm: 2,
}
"""What asks for norms, and for which order unless told."""
_SCALE_ONE = {Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__}
_SCALE_ALL = {torch._foreach_mul_, torch._foreach_div_}
