"""A tensor that a column unit has left as features: it goes home when anything but its next unit
touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.cost.ownership import TensorPlacement


class LazyRedistributed(Tensor):
    """All samples of the group and this member's features (``local``), shown in the shape that the
    tensor has at home. Any torch function first brings it there, once (``home``), and then runs.

    ``source`` and ``dim_held`` (the dimension that is sliced, if one is) tell a following unit what
    ``local`` is, ``owner`` among whom.
    """

    local: Tensor
    dim_held: int | None
    owner: object
    source: TensorPlacement
    _bring: Callable[[], Tensor] | None
    _home: Tensor | None
    _fresh: int
    """The version of what was brought home, before anybody changed it in place."""

    @staticmethod
    def of(
        local: Tensor,
        shape: torch.Size,
        dim: int | None,
        owner: object,
        bring: Callable[[], Tensor],
        source: TensorPlacement,
    ) -> LazyRedistributed:
        """A stand-in for the tensor of ``shape`` that ``bring()`` would fetch."""
        held = Tensor._make_wrapper_subclass(
            LazyRedistributed, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        held.local, held.dim_held, held.owner, held.source = local, dim, owner, source
        held._bring, held._home, held._fresh = bring, None, 0
        return held

    def home(self) -> Tensor:
        """The tensor with this rank's own samples and all features. Collective the first time."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._home is None:
                assert self._bring is not None
                # Its graph must not depend on whether the first touch wanted gradients.
                with torch.set_grad_enabled(self.local.requires_grad):
                    self._home, self._bring = self._bring(), None
                    self._fresh = _version(self._home)
            return self._home

    @property
    def changes(self) -> int:
        """How often what was brought home has been changed in place: if at all, ``local`` is not
        what the model means any more."""
        with torch._C.DisableTorchFunctionSubclass():
            return 0 if self._home is None else _version(self._home) - self._fresh

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(
            LazyRedistributed, LazyRedistributed.home, (args, kwargs)
        )
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise AssertionError(f"{func} met a tensor that has not been brought home")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
"""What can be answered without the values."""


def materialize(tree: Any) -> Any:
    """The tree with every held tensor brought home."""
    return pytree.tree_map_only(LazyRedistributed, LazyRedistributed.home, tree)


def show_to_backward_hooks(model: nn.Module, units: Iterable[str]) -> None:
    """Brings home what goes into and comes out of modules that have backward hooks: torch ties
    those to the tensors themselves, which a stand-in is not. ``units`` are the modules of units,
    inside which no tensor is held."""
    inside = tuple(f"{path}." for path in units)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return materialize((args, kwargs)) if _watched(module) else None

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return materialize(output) if _watched(module) else None

    for name, module in model.named_modules():
        if not name.startswith(inside):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)


def _watched(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
