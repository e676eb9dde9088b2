"""What torch calls without asking ``__torch_function__``: it gets the values of its arguments.

An ``autograd.Function`` and a function that ``torch.jit.script`` made look straight at their
arguments' memory. A tensor that is lazy has none, and a parameter that waits for its update has old
values there.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction  # torch has no public name for it

from .gradients.pending import PendingParam
from .redistribution.lazy import LazyRedistributed

_ScriptFunction: Any = torch.jit.ScriptFunction
_scripted_call = _ScriptFunction.__call__
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
    try:
        yield
    finally:
        with _lock:
            _uses -= 1
            if not _uses:
                del _SingleLevelFunction.apply  # type: ignore[attr-defined]
                _ScriptFunction.__call__ = _scripted_call


def _apply_to_values(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_SingleLevelFunction, cls).apply(*_values(args), **kwargs)


def _call_with_values(self: Any, *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(kwargs, _values(kwargs.values()), strict=True))
    return _scripted_call(self, *_values(args), **named)


def _values(arguments: Any) -> list[Any]:
    # Autograd sees only those tensors that are arguments themselves, so none is looked for inside.
    given = [a.materialize() if isinstance(a, LazyRedistributed) else a for a in arguments]
    for argument in given:
        # Asked each time, as finishing one gives the others of its unit their own class back.
        if isinstance(argument, PendingParam):
            argument._finish_for(given)
    return given
