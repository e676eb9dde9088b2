"""A gradient that is still on its way: whatever touches it waits until it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from .metadata import METADATA

Kind = TypeVar("Kind", bound=Tensor)


class WaitingGradient(Tensor):
    """Stands in ``grad`` for a gradient that ranks still exchange; after that, for the gradient.

    ``taken`` says that a step has taken the gradient over: it is applied before anything changes
    it, and zeros take its place without a wait.
    """

    taken: bool
    _arrive: Callable[[], Tensor] | None
    _vacate: Vacate
    _gradient: Tensor | None

    @classmethod
    def of(cls, like: Tensor, arrive: Callable[[], Tensor], vacate: Vacate) -> Self:
        """A stand-in with the shape of ``like``. ``arrive()`` waits for the gradient, ``vacate``
        gives zeros that stand in its place. Neither may hold the stand-in: it would live, and the
        gradient with it, until the garbage collector comes."""
        waiting = stand_in(cls, like.shape, like.stride(), like)
        waiting.taken, waiting._gradient = False, None
        waiting._arrive, waiting._vacate = arrive, vacate
        return waiting

    @property
    def arrived(self) -> bool:
        """Whether nothing has to be waited for."""
        return self._gradient is not None

    def complete(self) -> Tensor:
        """The gradient; waits for it the first time."""
        if self._gradient is None:
            assert self._arrive is not None
            self._gradient, self._arrive = self._arrive(), None
        return self._gradient

    def clear(self) -> None:
        """Zeros from now on."""
        if self._gradient is None and self.taken:
            self._gradient, self._arrive = self._vacate(self), None
        else:
            self.complete().zero_()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.zero_:
            args[0].clear()
            return args[0]
        if func is torch._foreach_zero_:
            return _clear_all(*args, **(kwargs or {}))
        args, kwargs = _completed((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _completed((args, kwargs or {}))  # autograd adds to it, say
        return func(*args, **kwargs)


def _completed(tree: Any) -> Any:
    return pytree.tree_map_only(WaitingGradient, lambda gradient: gradient.complete(), tree)


def _clear_all(self: list[Tensor]) -> None:
    waiting = [t for t in self if isinstance(t, WaitingGradient)]
    for gradient in waiting:
        gradient.clear()
    rest = [t for t in self if not isinstance(t, WaitingGradient)]
    if rest:
        torch._foreach_zero_(rest)


def stand_in(kind: type[Kind], shape: Sequence[int], strides: Sequence[int], like: Tensor) -> Kind:
    """A tensor of that kind without memory, with the type and the device of ``like``."""
    made: Kind = Tensor._make_wrapper_subclass(
        kind,
        shape,
        strides=strides,
        dtype=like.dtype,
        device=like.device,
        requires_grad=False,
    )
    return made


Vacate = Callable[[WaitingGradient], Tensor]
"""Gives the zeros that take the place of a stand-in."""


def vacating(parameter: nn.Parameter, zeros: Callable[[], Tensor]) -> Vacate:
    """``zeros()``, put into the parameter's ``grad`` where the stand-in is still there."""
    # Weak, as Python's garbage collector does not see through a parameter's grad.
    its = weakref.ref(parameter)

    def vacate(waiting: WaitingGradient) -> Tensor:
        made, parameter = zeros(), its()
        if parameter is not None and parameter.grad is waiting:
            parameter.grad = made
        return made

    return vacate


VALUELESS = METADATA | {Tensor.requires_grad_}
"""What does not touch the values of a gradient."""
