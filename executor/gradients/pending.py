"""Parameters and gradients that are on their way: whatever reads or changes one waits for it."""

# [Note: Reading a parameter or a gradient that is on its way]
# Backward and ``step()`` return while gradients still travel. Two tensor subclasses make sure that
# nobody sees a half-done value, and cost nothing once it is there:
#
# - A parameter whose update is pending keeps its object, since optimizers and modules hold it; its
#   *class* is swapped for one with ``PendingParam`` in front (``suspend``). Any torch function that
#   may read or change its values lands in ``__torch_function__``, which finishes the update, gives
#   the parameter its own class back (``resume``) and runs the function again. The unit's forward is
#   the usual first reader; ``state_dict``, ``.data`` and moving averages wait as well.
#   ``ResharedParam`` (reshard.py) does the same for parameters whose memory is free.
# - A gradient is *replaced* in ``grad`` by a ``WaitingGradient``, a wrapper without memory. Readers
#   get the average, for which the first one waits. ``__torch_dispatch__`` is there as well because
#   autograd accumulates into ``grad`` below the level of ``__torch_function__``. (After an early
#   release a ``ReleasedGradient`` stands there, which raises instead.)
#
# What asks for the shape, type or place only does not wait (``METADATA``).

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...models.trees import leaves_of, map_only
from ...planner.schema.errors import InputError

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_leaf", "is_sparse", "is_cuda",
    "is_meta", "requires_grad",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "element_size", "__len__", "is_floating_point",
    "is_complex", "is_contiguous",
)  # fmt: skip
METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
    ]
)
"""Torch functions that look at shape, type and place only."""

_GRAD: Any = Tensor.grad
PARAM_METADATA = METADATA | {
    _GRAD.__get__,
    _GRAD.__set__,
    _GRAD.__delete__,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}
"""What neither reads nor changes the values of a parameter."""
_GRAD_METADATA = METADATA | {Tensor.requires_grad_}
"""What neither reads nor changes the values of a gradient."""

_FINISH = "_meshwright_finish"


class PendingParam:
    """Mixed into the class of a parameter whose update has not been applied yet."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PARAM_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = leaves_of((args, kwargs))
        for leaf in leaves:
            # Asked each time, as finishing one gives the others of its unit their own class back.
            if isinstance(leaf, PendingParam):
                leaf._finish_for(leaves)
        return func(*args, **(kwargs or {}))

    def _finish_for(self, arguments: list[Any]) -> None:
        finish(self)

    # Both would otherwise copy the swapped class, and the callback, along with the values.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        return self.__deepcopy__(memo)  # its own class's

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        return self.__reduce_ex__(protocol)


def suspend(
    parameter: nn.Parameter, apply: Callable[[], None], kind: type[PendingParam] = PendingParam
) -> None:
    """Makes ``parameter`` wait: its first reader calls ``apply()``, which must ``resume`` it.
    ``kind`` is what is mixed into its class meanwhile."""
    parameter.__dict__[_FINISH] = apply
    # The class is swapped and not the object, which optimizers and modules hold.
    parameter.__class__ = _pending_class(type(parameter), kind)  # type: ignore[arg-type]


def resume(parameter: nn.Parameter) -> None:
    """Makes the parameter as any other again."""
    if isinstance(parameter, PendingParam):
        del parameter.__dict__[_FINISH]
        classes: Any = type(parameter).__mro__  # ours and the mixins, then its own
        parameter.__class__ = next(c for c in classes if not issubclass(c, PendingParam))


def finish(parameter: Any) -> None:
    parameter.__dict__[_FINISH]()


def bare(parameter: Tensor) -> Tensor:
    """The parameter's memory as it is now, which autograd does not follow; waits for nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


@cache  # one class for all: what is cached by type, in torch or elsewhere, holds from step to step
def _pending_class(own: type, kind: type[PendingParam]) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


class GradStandIn(Tensor):
    """Stands in ``grad``, without memory. Whatever reads it gets what ``complete`` returns."""

    answers_first = True
    """Among other kinds of tensors: what it stands for may be of theirs, as a divided gradient."""
    not_to_be_unscaled = ""
    """Why a gradient scaler cannot have its scale back."""

    @classmethod
    def like(cls, tensor: Tensor) -> Self:
        """A stand-in with the shape, the type and the device of a tensor."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=False,
        )
        return made

    def complete(self) -> Tensor:
        raise NotImplementedError

    def clear(self) -> None:
        """Stands for zeros from now on."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GRAD_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Both forms of ``zero_grad(set_to_none=False)``: zeros need no average to wait for.
        if func is Tensor.zero_:
            args[0].clear()
            return args[0]
        if func is torch._foreach_zero_:
            gradients = args[0] if args else kwargs["self"]
            for gradient in gradients:
                if isinstance(gradient, GradStandIn):
                    gradient.clear()
            if rest := [t for t in gradients if not isinstance(t, GradStandIn)]:
                torch._foreach_zero_(rest)
            return None
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            for gradient in args[0]:
                if reason := getattr(gradient, "not_to_be_unscaled", ""):
                    raise InputError(reason)
        args, kwargs = _completed((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _completed((args, kwargs or {}))  # autograd adds to it, say
        return func(*args, **kwargs)


def _completed(tree: Any) -> Any:
    return map_only(GradStandIn, lambda gradient: gradient.complete(), tree)


class WaitingGradient(GradStandIn):
    """Stands for a gradient that ranks still exchange; after that, for the gradient.

    ``taken`` says that a step has taken the gradient over: it is applied before anything changes
    it, and zeros take its place without a wait.
    """

    taken: bool
    _arrive: Callable[[], Tensor] | None
    _vacate: Vacate
    _gradient: Tensor | None

    @classmethod
    def of(cls, like: Tensor, arrive: Callable[[], Tensor] | None, vacate: Vacate) -> Self:
        """A stand-in with the shape of ``like``. ``arrive()`` waits for the gradient, ``vacate``
        gives zeros that stand in its place."""
        # Neither may hold the stand-in: it would live, and the gradient with it, until the garbage
        # collector comes.
        waiting = cls.like(like)
        waiting.taken, waiting._gradient = False, None
        waiting._arrive, waiting._vacate = arrive, vacate
        return waiting

    def complete(self) -> Tensor:
        if self._gradient is None:
            assert self._arrive is not None
            self._gradient, self._arrive = self._arrive(), None
        return self._gradient

    def clear(self) -> None:
        if self._gradient is None and self.taken:
            # The step keeps the gradient that is on its way, and nobody need wait for it here.
            self._gradient, self._arrive = self._vacate(self), None
        else:
            self.complete().zero_()


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


def weakly(method: Callable[..., None], *args: object) -> Callable[..., None]:
    """Calls a bound ``method`` with ``args``, whatever it is called with, while its object and
    these are there."""
    # Weak, as Python's garbage collector does not see through a parameter's hooks. Were they to
    # hold what holds the parameter, nothing of a run would ever be freed.
    method_ref, refs = weakref.WeakMethod(method), [weakref.ref(arg) for arg in args]

    def call(*_: object) -> None:
        bound, alive = method_ref(), [ref() for ref in refs]
        if bound is not None and all(arg is not None for arg in alive):
            bound(*alive)

    return call
