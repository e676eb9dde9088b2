"""What a script does otherwise than its plan counts on, where that costs more memory than allowed:
an optimizer that keeps more, batches that are not cut. It trains right all the same, so rank 0
warns and goes on.
"""

from __future__ import annotations

import warnings

import torch
from torch.optim import Optimizer

from ..planner.schema.goal import STATE_COPIES, STATE_OPTIONS
from ..planner.schema.plan import Plan


def state_copies(optimizer: Optimizer) -> int | None:
    """How many values the optimizer keeps for each of a parameter's; None where that is not known.
    Options that keep more (``amsgrad``, say) count."""
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None):
        return None
    if name not in STATE_COPIES:
        return None
    groups = optimizer.param_groups
    more = (sum(bool(group.get(option)) for option in STATE_OPTIONS) for group in groups)
    return STATE_COPIES[name] + max(more, default=0)


def check_optimizer_state(optimizer: Optimizer | None, plan: Plan) -> None:
    """Warns where the optimizer keeps more than a plan under a memory limit was made for."""
    kept = state_copies(optimizer) if optimizer is not None else None
    if kept is None or plan.goal.memory_limit_bytes is None or kept <= plan.goal.state_copies:
        return
    warnings.warn(
        f"this {type(optimizer).__name__} keeps {_values(kept)} for each of a parameter's, and the "
        f"plan was made for {plan.goal.optimizer} with {_values(plan.goal.state_copies)}: it takes "
        "more memory than its limit allows for; plan with the optimizer that you use (--optimizer)",
        stacklevel=4,
    )


def _values(count: int) -> str:
    return f"{count} value" if count == 1 else f"{count} values"


class MicroBatchCheck:
    """Whether batches are cut as the plan asks for to keep its memory limit."""

    def __init__(self, plan: Plan) -> None:
        self._parts = plan.micro_batches if plan.goal.memory_limit_bytes is not None else 1

    def exchanged(self, backwards: int) -> None:
        """Gradients of so many backwards were exchanged together; warns once where they are fewer
        than planned."""
        if backwards >= self._parts:
            return
        parts, self._parts = self._parts, 1
        warnings.warn(
            f"the plan cuts each batch into {parts} micro-batches to keep its memory limit, and "
            f"{backwards} backward ran before gradients were exchanged: iterate over "
            f"meshwright.micro_batches(model, batch, {parts})",
            stacklevel=2,
        )
