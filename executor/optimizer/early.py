"""Updates that are made in backward, and the step after it, which must have meant the same.

A step that is called after backward has settled nothing yet when gradients are applied in it. So
what the user may do between the two and would be too late is refused: other hyperparameters, a
gradient scaler, a closure, and no step at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ..gradients.buckets import GradParam
from ..gradients.release import ReleasedGradient

Settings = list[dict[str, Any]]
"""The hyperparameters of each group."""


class EarlyUpdates:
    """Those of one optimizer. ``apply(parameters)`` updates some by their gradients."""

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
                "exchanges (no_sync and micro_batches add up), or plan with --forbid early-release"
            )

    def update(self, entries: Sequence[GradParam]) -> None:
        """Applies and frees the gradients of those entries that are the optimizer's."""
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        mine = [entry for entry in entries if entry.parameter in held]
        if not mine:
            return
        if not self._updated:
            self._settings = _settings(self._optimizer)
        with torch.inference_mode(False), torch.no_grad():
            self._apply([entry.parameter for entry in mine])
        for entry in mine:
            self._updated.add(entry.parameter)
            entry.parameter.grad = ReleasedGradient.of(entry.parameter, entry.name)

    def end(self, *, closure: bool, scaled: bool) -> None:
        """The step after a backward: it must be as gradients were applied."""
        if closure or scaled:
            what = "a closure" if closure else "a gradient scaler"
            raise InputError(
                f"step() was called with {what}, and the plan applies gradients in backward (early "
                "release), before it: do without, or plan with --forbid early-release"
            )
        if self._updated:
            self._check_settings()
        for parameter in self._updated:
            if isinstance(parameter.grad, ReleasedGradient):
                parameter.grad = None
        self._updated.clear()

    def _check_settings(self) -> None:
        for before, after in zip(self._settings, _settings(self._optimizer), strict=False):
            for name, value in before.items():
                now = after.get(name)
                if not _equal(value, now):
                    raise InputError(
                        f"the optimizer's {name} was {value} in backward, where the plan applies "
                        f"gradients (early release), and is {now} at step(): change it after "
                        "step(), or plan with --forbid early-release"
                    )


def _settings(optimizer: Optimizer) -> Settings:
    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    groups = optimizer.param_groups
    return [{k: copied(v) for k, v in group.items() if k != "params"} for group in groups]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.as_tensor(one).equal(torch.as_tensor(other)))
    return bool(one == other)
