"""Layer dropping: whole parameters skip a step's exchange and accumulate locally (Lee et al.,
Applied Sciences 10(24):8846, 2020; the full text was not at hand, this follows the abstract).

Of the parameters of units that the plan drops, those whose gradients have the largest mean absolute
values are sent, as far as a budget of bytes lasts (``planner/simulate/dropping.py``); the threshold
of the paper is the mean at which it ends.
"""

# What is sent is decided alike on all ranks, from what the backward before has left: each
# gradient's mean absolute value, averaged over ranks. That sum travels in the background while the
# next forward runs, as waiting for the norms of this backward would hold back every gradient until
# the last is computed.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...planner.schema.errors import InputError
from ...planner.simulate.dropping import Budget
from ..comm.control import Control, PendingGather
from .buckets import GradParam
from .feedback import LossyGradGroup, drop_what_overflowed, l1
from .slices import Slice


class Dropping:
    """The ranks' agreement on which parameters are sent."""

    name = "dropped"

    def __init__(
        self, grad_groups: Sequence[DroppedGradGroup], control: Control, patience: int
    ) -> None:
        self._control, self._patience = control, patience
        params = [param for grad_group in grad_groups for param in grad_group.params]
        self._droppable = [p for p in params if not p.whole]
        self._budgets: list[tuple[Budget, list[GradParam]]] = []
        for ratio in sorted({p.ratio for p in self._droppable}):
            mine = [p for p in self._droppable if p.ratio == ratio]
            fixed = sum(p.full_bytes for p in params if p.ratio == ratio and p.whole)
            self._budgets.append((Budget(ratio, [p.full_bytes for p in mine], fixed), mine))
        self._waited = dict.fromkeys(self._droppable, 0)
        self._sizes: dict[GradParam, Tensor] = {}
        self._coming: PendingGather | None = None
        self._due = set(self._droppable)  # the first backward sends everything
        for grad_group in grad_groups:
            grad_group.agreement = self

    def sends(self, param: GradParam) -> bool:
        return param.whole or param in self._due

    def note(self, param: GradParam, expected: Tensor) -> None:
        """The sum of absolute values that this rank expects of a parameter in the next backward."""
        self._sizes[param] = expected

    def begin(self) -> None:
        if self._coming is None:
            return
        (sums,) = self._coming.rows()
        self._coming = None
        means = {
            param: math.inf if math.isnan(total) else total / (param.full_numel * param.group.size)
            for param, total in zip(self._droppable, sums, strict=True)
        }
        self._due = set()
        for budget, mine in self._budgets:
            expected, waited = [means[p] for p in mine], [self._waited[p] for p in mine]
            sent = budget.choose(expected, waited, self._patience)
            self._due |= {p for p, goes in zip(mine, sent, strict=True) if goes}

    def end(self) -> None:
        if not self._droppable:
            return
        for param in self._droppable:
            self._waited[param] = 0 if param in self._due else self._waited[param] + 1
        noted = [param for param in self._droppable if param in self._sizes]
        # All at once: the host waits for the device here, and nowhere else in a step.
        values = torch.stack([self._sizes[param] for param in noted]).tolist() if noted else []
        known = dict(zip(noted, values, strict=True))
        sizes = [known.get(param, 0.0) for param in self._droppable]
        self._sizes.clear()
        vector = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        self._coming = self._control.all_reduce_sum(
            vector, "the agreement on which gradients are sent"
        )

    def state(self) -> dict[str, Any]:
        self.begin()  # what is on its way would be lost
        return {
            "due": [p.name for p in self._droppable if p in self._due],
            "waited": {p.name: self._waited[p] for p in self._droppable},
            "credit_bytes": [budget.credit_bytes for budget, _ in self._budgets],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raises ``InputError`` where a ``state`` is of a plan that drops other parameters."""
        waited, names = set(state["waited"]), {p.name for p in self._droppable}
        if waited != names or len(state["credit_bytes"]) != len(self._budgets):
            other = f"{min(waited ^ names)!r}" if waited != names else "other ratios"
            raise InputError(
                f"the exchange state is of a plan that differs in whether it drops {other}: load "
                "it under the plan that saved it"
            )

    def load(self, state: dict[str, Any]) -> None:
        self._coming = None
        self._due = {p for p in self._droppable if p.name in set(state["due"])}
        self._waited = {p: int(state["waited"][p.name]) for p in self._droppable}
        for (budget, _), credit in zip(self._budgets, state["credit_bytes"], strict=True):
            budget.credit_bytes = float(credit)


class DroppedGradGroup(LossyGradGroup):
    """Gradients of which only those that are due are sent; the others are kept as residuals."""

    agreement: Dropping
    _kept = torch.empty(0, device="cpu")

    def sends(self, param: GradParam) -> bool:
        return self.agreement.sends(param)

    def following(self, number: int) -> Slice:
        one = self.slices[number]
        one.skipped = not self.sends(one.params[0])
        return one

    def send(self, number: int) -> None:
        if number == 0:
            self._release()
        super().send(number)

    def _release(self) -> None:
        # The residual of parameters that are due is sent with what is new.
        for param, feedback in self.feedback.items():
            if self.sends(param):
                gradient = self.gradients[param]
                # Nothing of it will be left: the next will be about as large as this one.
                self.agreement.note(param, l1(gradient))
                feedback.take_all(gradient)

    def unsent(self) -> list[Tensor]:
        """What waits to be sent."""
        found = (feedback.residual for feedback in self.feedback.values())
        return [residual for residual in found if residual is not None]

    def hold(self, param: GradParam) -> None:
        gradient = self.gradients[param]
        if gradient is self._kept:  # an empty tensor, which stands for what is in the residual
            return
        new = l1(gradient)
        # Should the next gradient overflow too, its L1 norm is infinite, so that the parameter is
        # sent and all ranks see it.
        drop_what_overflowed(gradient, new, on_stream=param.group.on_stream)
        self.agreement.note(param, l1(self.feedback[param].add(gradient)) + new)
        self.gradients[param] = self._kept
