"""The output of a unit as the unit leaves it: it is redistributed when something else than the next
unit asks for its values. See [Note: Forms of a divided tensor] in redistribute.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...models.trees import map_only
from ...planner.cost.ownership import TensorPlacement


class LazyRedistributed(Tensor):
    """What this rank has of a tensor (``local``, placed as ``source`` says), shown in the shape
    that this rank's own samples have. Any torch function first materializes it, once, and runs on
    that.

    ``sharded_dim`` (the dim that is sliced, if one is) and ``owner`` (the members that hold the
    slices) tell a following unit what ``local`` is.
    """

    local: Tensor
    sharded_dim: int | None
    owner: object
    source: TensorPlacement
    _redistribute: Callable[[], Tensor] | None
    _materialized: Tensor | None
    _first_version: int

    @staticmethod
    def of(
        local: Tensor,
        shape: torch.Size,
        sharded_dim: int | None,
        owner: object,
        redistribute: Callable[[], Tensor],
        source: TensorPlacement,
    ) -> LazyRedistributed:
        """What stands for the tensor of ``shape`` that ``redistribute()`` makes of ``local``."""
        # A wrapper without storage: torch sees shape, dtype and device, and nothing can read values
        # past ``__torch_function__``. Autograd follows the materialized tensor, not this one.
        lazy = Tensor._make_wrapper_subclass(
            LazyRedistributed, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        lazy.local, lazy.sharded_dim, lazy.owner, lazy.source = local, sharded_dim, owner, source
        lazy._redistribute, lazy._materialized, lazy._first_version = redistribute, None, 0
        return lazy

    def materialize(self) -> Tensor:
        """The tensor with this rank's own samples and all features. Collective the first time."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._materialized is None:
                assert self._redistribute is not None
                # Its graph must not depend on whether the first use wanted gradients.
                with torch.set_grad_enabled(self.local.requires_grad):
                    # The closure holds ``local``'s graph: it goes as soon as it has run.
                    self._materialized, self._redistribute = self._redistribute(), None
                    self._first_version = version_of(self._materialized)
            return self._materialized

    @property
    def changes(self) -> int:
        """How often the materialized tensor has been changed in place: if at all, ``local`` is not
        what the model means any more. Of inference mode, which counts nothing, once."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._materialized is None:
                return 0
            if self._materialized.is_inference():
                return 1
            return version_of(self._materialized) - self._first_version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = materialize((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # ``__torch_function__`` above has materialized whatever Python calls; what comes here past
        # it would read memory that a wrapper does not have.
        raise AssertionError(f"{func} met a tensor that has not been materialized")


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place."""
    if isinstance(tensor, LazyRedistributed):
        return tensor.changes
    return 0 if tensor.is_inference() else tensor._version  # torch counts none of inference mode


def check_version(tensor: Tensor, version: int) -> None:
    """Raises torch's own error where a tensor that was saved at ``version`` has been changed in
    place since: autograd does not compare versions of what hooks have packed."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {list(tensor.shape)} is at version "
            f"{tensor._version}, expected version {version}"
        )


# What can be answered without the values.
_SHAPE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
}


class _Functions(threading.local):
    """How many ``autograd.Function``s this thread is in the forward of."""

    depth = 0


_functions = _Functions()


@contextmanager
def in_function() -> Iterator[None]:
    """Around the forward of an ``autograd.Function``, which may call modules (checkpointing)."""
    # What it returns gets its graph from autograd, and a lazy tensor hides another one in it, which
    # has none there: the next unit would take that, and the units before get no gradient.
    _functions.depth += 1
    try:
        yield
    finally:
        _functions.depth -= 1


def may_be_lazy() -> bool:
    """Whether a unit that is called now may leave a lazy tensor."""
    return not _functions.depth


def materialize(tree: Any) -> Any:
    """The tree with the values of every lazy tensor in it."""
    return map_only(LazyRedistributed, LazyRedistributed.materialize, tree)


def materialize_for_backward_hooks(model: nn.Module, units: Iterable[str]) -> None:
    """Materializes what goes into and comes out of modules that have backward hooks. ``units`` are
    the modules of units, inside which no tensor is lazy."""
    inside = tuple(f"{path}." for path in units)

    # Torch ties backward hooks to the tensors themselves, which a lazy one is not. Whether a module
    # has some is asked in each forward: the user may add them at any time.
    def hooked(module: nn.Module) -> bool:
        return bool(module._backward_hooks or module._backward_pre_hooks)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return materialize((args, kwargs)) if hooked(module) else None

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return materialize(output) if hooked(module) else None

    for name, module in model.named_modules():
        if not name.startswith(inside):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)
