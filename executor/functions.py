"""What torch calls without asking ``__torch_function__``: it gets the values of its arguments.

An ``autograd.Function`` and a function that ``torch.jit.script`` made look straight at their
arguments' memory, as does whatever takes a nested tensor. A tensor that is lazy has none, and a
parameter that waits for its update has old values there.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction  # torch has no public name for it
from torch.nested._internal.nested_tensor import NestedTensor

from .gradients.pending import PendingParam
from .redistribution.lazy import LazyRedistributed, in_function, materialize

_ScriptFunction: Any = torch.jit.ScriptFunction
_scripted_call = _ScriptFunction.__call__
_nested_function: Any = vars(NestedTensor)["__torch_function__"]
_lock = threading.Lock()
_uses = 0


@contextmanager
def values_for_functions() -> Iterator[None]:
    """While it lasts, such functions get the values of lazy tensors and of waiting parameters."""
    # A lazy tensor requires no gradient: what a function makes of it would have no graph, and the
    # units before would get no gradient. Models may hold the bound ``apply`` of their functions, so
    # what it calls in turn is replaced. Other threads may have forwards of their own: the last one
    # that ends restores it.
    global _uses
    with _lock:
        _uses += 1
        if _uses == 1:
            _SingleLevelFunction.apply = classmethod(_apply_to_values)  # type: ignore[attr-defined]
            _ScriptFunction.__call__ = _call_with_values
            NestedTensor.__torch_function__ = classmethod(_nested_with_values)  # type: ignore
    try:
        yield
    finally:
        with _lock:
            _uses -= 1
            if not _uses:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
                _ScriptFunction.__call__ = _scripted_call
                NestedTensor.__torch_function__ = _nested_function  # type: ignore[method-assign]


def _apply_to_values(cls: Any, *args: Any, **kwargs: Any) -> Any:
    given = [_returning_values(a) if _is_called(cls, a) else a for a in _values(args)]
    with in_function():
        return super(_SingleLevelFunction, cls).apply(*given, **kwargs)


def _is_called(cls: Any, argument: Any) -> bool:
    """Whether a function is given a part of the model to run, then and again in its backward."""
    if isinstance(argument, nn.Module):
        return bool(cls.__name__ == "CheckpointFunction")  # others may look into it
    return isinstance(argument, FunctionType | MethodType | partial)


def _returning_values(part: Any) -> Any:
    """The part of a model, which then returns no lazy tensors: the function's backward begins at
    what it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return materialize(part(*args, **kwargs))

    return run


def _call_with_values(self: Any, *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(kwargs, _values(kwargs.values()), strict=True))
    return _scripted_call(self, *_values(args), **named)


def _nested_with_values(
    cls: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    named = dict(zip(kwargs or {}, _values((kwargs or {}).values()), strict=True))
    return _nested_function.__func__(cls, func, types, tuple(_values(args)), named)


def _values(arguments: Any) -> list[Any]:
    # Autograd sees only those tensors that are arguments themselves, so none is looked for inside.
    given = [a.materialize() if isinstance(a, LazyRedistributed) else a for a in arguments]
    for argument in given:
        # Asked each time, as finishing one gives the others of its unit their own class back.
        if isinstance(argument, PendingParam):
            argument._finish_for(given)
    return given
