"""Early release: a unit's gradients are exchanged, applied and freed before backward goes on.

So that no more gradients are alive than planned, whatever the link, backward waits for them. They
leave between the slices that are not waited for, at a fixed place: before the first that gets ready
later. What stands before them in the order is then ready on every rank that waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...planner.schema.errors import InputError
from ...planner.simulate.slicing import SendSlot
from .buckets import GradParam
from .slices import GradGroup
from .waiting import VALUELESS, stand_in


class Updater(Protocol):
    """Who applies gradients in backward."""

    def begin_backward(self) -> None:
        """Before a backward that may apply some."""

    def update(self, entries: Sequence[GradParam]) -> None:
        """Applies the entries' gradients, which are complete, and frees them."""


class Release:
    """The parcels of one exchange whose gradients are released early."""

    def __init__(self, grad_groups: Iterable[GradGroup]) -> None:
        self._parcels = [p for p in grad_groups if p.released]
        self._left: list[GradGroup] = []
        self.updater: Updater | None = None

    def begin(self) -> None:
        """Before a backward."""
        self._left = list(self._parcels)
        if self._parcels and self.updater is not None:
            self.updater.begin_backward()

    def over(self, grad_group: GradGroup) -> bool:
        """Whether a parcel's gradients have been applied in this backward."""
        return grad_group.released and grad_group not in self._left

    def due(self) -> Iterator[GradGroup]:
        """Those that have left and not been applied in this backward."""
        for grad_group in [p for p in self._left if p.sent == len(p.slices)]:
            self._left.remove(grad_group)
            yield grad_group


def placed(turns: Sequence[SendSlot], grad_groups: Sequence[GradGroup]) -> list[SendSlot]:
    """The ``turns`` of what is not released, with those of what is. ``grad_groups`` are in forward
    order: units get ready from the last to the first."""
    found = list(turns)
    for number in reversed(range(len(grad_groups))):
        grad_group = grad_groups[number]
        if grad_group.released:
            later = (i for i, t in enumerate(found) if grad_groups[t.group].unit < grad_group.unit)
            at = next(later, len(found))
            found[at:at] = [SendSlot(number, one) for one in range(len(grad_group.slices))]
    return found


class ReleasedGradient(Tensor):
    """Stands in ``grad``, without memory, for a gradient that was applied in backward, until the
    step: whoever would clip, unscale or read it is told, instead of finding nothing to do."""

    parameter_name: str

    @staticmethod
    def of(like: Tensor, name: str) -> ReleasedGradient:
        """A stand-in for the gradient of the parameter ``like`` of that name."""
        released = stand_in(ReleasedGradient, like.shape, like.stride(), like)
        released.parameter_name = name
        return released

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient({self.parameter_name!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.zero_:
            return args[0]
        if func is torch._foreach_zero_:
            rest = [t for t in args[0] if not isinstance(t, ReleasedGradient)]
            return torch._foreach_zero_(rest) if rest else None
        raise _gone((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _gone((args, kwargs))


def _gone(tree: Any) -> InputError:
    leaves = torch.utils._pytree.tree_leaves(tree)
    one = next(leaf for leaf in leaves if isinstance(leaf, ReleasedGradient))
    return InputError(
        f"the gradient of {one.parameter_name!r} was applied and freed in backward, as the plan "
        "releases it early, so it cannot be clipped, unscaled, read or added to: leave that out, "
        "or plan with --forbid early-release"
    )
