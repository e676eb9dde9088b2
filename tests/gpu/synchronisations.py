"""Counts where the host asks a tensor of the device for its value, or gives it one in a way that
waits for the device.

On CPUs every tensor is the host's. What is made with ``device="cpu"`` is so on a GPU as well (the
vectors of control groups); all others are taken for the device's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import meshwright
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__",
          "nonzero", "masked_select", "unique", "equal")  # fmt: skip
"""Methods of tensors that need values on the host, or sizes that follow from values."""
FUNCTIONS = ("nonzero", "masked_select", "unique", "equal", "allclose")
OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero",
             "aten.equal")  # fmt: skip
"""The same where operators ask for it themselves."""
MASKED = ("aten.index", "aten.index_put", "aten.index_put_")
"""Those where they are given a mask, which they count."""
MAKING = ("tensor", "empty", "zeros", "ones", "full", "as_tensor", "empty_like", "zeros_like",
          "get_rng_state")  # fmt: skip
ON_HOSTS = ("get_rng_state",)
"""Those that always make them on the host."""
ROOT = Path(meshwright.__file__).parent


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).rsplit(".", 1)[0]
        masked = name in MASKED and any(
            isinstance(part, Tensor) and part.dtype == torch.bool for part in tree_leaves(args[1])
        )
        if name in OPERATORS or masked:
            self.note(name, args[:1])
        return func(*args, **(kwargs or {}))


def _is_copied(index: Any, dims: int) -> bool:
    """Whether torch makes a tensor on the host of a number that is put there and copies it: for one
    element, and for those that a tensor names. A slice is filled on the device."""
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, Tensor) for one in indices):
        return True
    return len(indices) == dims and all(isinstance(one, int) for one in indices)


def _place() -> str:
    """The innermost line of the package that runs."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT.resolve()) and "tests" not in path.parts:
            return f"{path.relative_to(ROOT.resolve())}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def _setting(note: Callable[[str, tuple[Any, ...]], None]) -> Callable[..., None]:
    before = Tensor.__setitem__

    def set_to(tensor: Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor) and _is_copied(index, tensor.ndim):
            note("__setitem__", (tensor,))
        before(tensor, index, value)

    return set_to


@contextmanager
def counted() -> Iterator[list[str]]:
    """The places at which the host waits meanwhile, by name and line, in all threads (operators in
    this one)."""
    places: list[str] = []
    # Kept, so that no tensor of the device gets their memory while it is counted.
    hosts: list[Tensor] = []
    inside = False

    def is_hosts(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return True
        own = value.untyped_storage()._cdata
        return any(own == host.untyped_storage()._cdata for host in hosts)

    def note(name: str, args: tuple[Any, ...]) -> None:
        nonlocal inside
        # One call may ask through another.
        if not inside and not all(map(is_hosts, args)):
            places.append(f"{name} at {_place()}")

    def asking(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def ask(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            note(name, args)
            outer, inside = inside, True
            try:
                return before(*args, **kwargs)
            finally:
                inside = outer

        return ask

    def making(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def make(*args: Any, **kwargs: Any) -> Any:
            found = before(*args, **kwargs)
            like = args and isinstance(args[0], Tensor) and is_hosts(args[0])
            # By name: what is made where another tensor is, ``device=x.device``, is not the host's.
            named = isinstance(kwargs.get("device"), str) and kwargs["device"] == "cpu"
            if named or like or before.__name__ in ON_HOSTS:
                hosts.append(found)
            return found

        return make

    changes = [patch.object(Tensor, n, asking(n, getattr(Tensor, n))) for n in ASKING]
    changes.append(patch.object(Tensor, "__setitem__", _setting(note)))
    changes += [patch.object(torch, n, asking(n, getattr(torch, n))) for n in FUNCTIONS]
    changes += [patch.object(torch, n, making(getattr(torch, n))) for n in MAKING]
    for change in changes:
        change.start()
    try:
        with _Operators(note):
            yield places
    finally:
        for change in changes:
            change.stop()
