"""Early release: a unit's gradients are exchanged, applied and freed before backward goes on."""

# So that no more gradients are alive than planned, whatever the link, backward waits for them. They
# leave between the slices that are not waited for, at a fixed place: before the first that gets
# ready later. What stands before them in the order is then ready on every rank that waits.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ...planner.schema.pins import EARLY_RELEASE, forbidding
from ...planner.simulate.slicing import SendSlot
from ..comm.steps import parameters_of
from .buckets import GradParam
from .pending import GradStandIn
from .slices import GradGroup

Settings = list[dict[str, Any]]
"""The hyperparameters of each group of an optimizer."""


class Release:
    """The groups of one exchange whose gradients are released early."""

    def __init__(self, grad_groups: Iterable[GradGroup]) -> None:
        self._released = [g for g in grad_groups if g.released]
        self._left: list[GradGroup] = []
        self.updater: EarlyUpdates | None = None

    def begin(self) -> None:
        self._left = list(self._released)
        if self._released and self.updater is not None:
            self.updater.begin_backward()

    def is_applied(self, grad_group: GradGroup) -> bool:
        """Whether a group's gradients have been applied in this backward."""
        return grad_group.released and grad_group not in self._left

    def due(self, *, ended: bool) -> Iterator[GradGroup]:
        """Those that have left and not been applied in this backward; until that has ``ended`` no
        part of a unit whose other gradients are to come."""
        # A bias that is added behind a divided unit's reduction has its gradient first. Was it
        # updated then, a unit that is recomputed would be computed with another bias.
        unfinished = {
            p.unit for g in self._left for p in g.params if p not in g.gradients and not ended
        }
        for grad_group in [g for g in self._left if g.sent == len(g.slices)]:
            if not any(param.unit in unfinished for param in grad_group.params):
                self._left.remove(grad_group)
                yield grad_group


def place_released(slots: Sequence[SendSlot], grad_groups: Sequence[GradGroup]) -> list[SendSlot]:
    """The ``slots`` of the other groups, with those of the groups that are released early put
    between them. ``grad_groups`` are in forward order: units get ready from the last to the
    first."""
    found = list(slots)
    for number in reversed(range(len(grad_groups))):
        grad_group = grad_groups[number]
        if grad_group.released:
            later = (i for i, t in enumerate(found) if grad_groups[t.group].unit < grad_group.unit)
            at = next(later, len(found))
            found[at:at] = [SendSlot(number, one) for one in range(len(grad_group.slices))]
    return found


class EarlyUpdates:
    """One optimizer's updates in backward. ``apply(parameters)`` updates these."""

    # The step that follows must have meant the same. So what the user may do between backward and
    # ``step()``, and would be too late, is refused: other hyperparameters, a gradient scaler, a
    # closure, and no step at all.

    def __init__(self, optimizer: Optimizer, apply: Callable[[list[nn.Parameter]], None]) -> None:
        self._optimizer, self._apply = optimizer, apply
        self._updated: set[nn.Parameter] = set()
        self._settings: Settings = []

    def begin_backward(self) -> None:
        """Refuses a backward that would update parameters twice before one step."""
        if self._updated:
            raise InputError(
                "the gradients of the last backward were applied in it, as the plan releases them "
                "early, and no step() has followed: call step() after each backward that "
                "exchanges (no_sync and micro_batches add up), or plan with "
                f"{forbidding(EARLY_RELEASE)}"
            )

    def update(self, params: Sequence[GradParam]) -> None:
        """Applies and frees the gradients of those parameters that are the optimizer's."""
        optimized = parameters_of(self._optimizer)
        own = [param for param in params if param.parameter in optimized]
        if not own:
            return
        if not self._updated:
            self._settings = _settings(self._optimizer)
        # The state that the optimizer makes here outlives this backward.
        with torch.inference_mode(False), torch.no_grad():
            self._apply([param.parameter for param in own])
        for param in own:
            self._updated.add(param.parameter)
            param.parameter.grad = ReleasedGradient.of(param.parameter, param.name)

    def end(self, *, closure: bool, scaled: bool) -> None:
        """The step after a backward: it must be as gradients were applied."""
        if closure or scaled:
            what = "a closure" if closure else "a gradient scaler"
            raise InputError(
                f"step() was called with {what}, and the plan applies gradients in backward (early "
                f"release), before it: do without, or plan with {forbidding(EARLY_RELEASE)}"
            )
        if not self._updated:
            return
        for before, after in zip(self._settings, _settings(self._optimizer), strict=False):
            for name, value in before.items():
                now = after.get(name)
                if not _equal(value, now):
                    raise InputError(
                        f"the optimizer's {name} was {value} in backward, where the plan applies "
                        f"gradients (early release), and is {now} at step(): change it after "
                        f"step(), or plan with {forbidding(EARLY_RELEASE)}"
                    )
        for parameter in self._updated:
            if isinstance(parameter.grad, ReleasedGradient):
                parameter.grad = None
        self._updated.clear()


def _settings(optimizer: Optimizer) -> Settings:
    return [
        {k: v for k, v in g.items() if k != "params"} for g in copy_groups(optimizer.param_groups)
    ]


def copy_groups(groups: Settings) -> Settings:
    """The groups of an optimizer with their hyperparameters as they are now."""
    return [
        {k: v.clone() if isinstance(v, Tensor) and k != "params" else v for k, v in g.items()}
        for g in groups
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.as_tensor(one).equal(torch.as_tensor(other)))
    return bool(one == other)


class ReleasedGradient(GradStandIn):
    """Stands for a gradient that was applied in backward, until the step. Reading it raises."""

    # With None in its place, who clips or unscales would find nothing to do, and not know.
    parameter_name: str

    @staticmethod
    def of(parameter: Tensor, name: str) -> ReleasedGradient:
        released = ReleasedGradient.like(parameter)
        released.parameter_name = name
        return released

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient({self.parameter_name!r})"

    def complete(self) -> Tensor:
        raise InputError(
            f"the gradient of {self.parameter_name!r} was applied and freed in backward, as the "
            "plan releases it early, so it cannot be clipped, unscaled, read or added to: leave "
            f"that out, or plan with {forbidding(EARLY_RELEASE)}"
        )

    def clear(self) -> None:
        pass
